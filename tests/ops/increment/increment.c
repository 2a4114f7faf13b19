#include "opjit.h"

opjit_status increment_cpu(opjit_tensor *x)
{
    OPJIT_DISPATCH_REAL(x->dtype, "increment", {
        scalar_t *data = (scalar_t *)x->data;
        for (int64_t i = 0; i < x->numel; i++)
            data[opjit_offset(x, i)] += 1;
    });
    return OPJIT_OK;
}
