#include "opjit.h"

opjit_status double_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    OPJIT_DISPATCH_FLOATING(x->dtype, "double", {
        const scalar_t *from = (const scalar_t *)x->data;
        scalar_t *to = (scalar_t *)out->data;
        for (int64_t i = 0; i < x->numel; i++)
            to[opjit_offset(out, i)] = 2 * from[opjit_offset(x, i)];
    });
    return OPJIT_OK;
}
