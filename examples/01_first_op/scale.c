#include "opjit.h"

opjit_status scale_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
{
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    OPJIT_DISPATCH_FLOATING(x->dtype, "scale", {
        const scalar_t *from = (const scalar_t *)x->data;
        scalar_t *to = (scalar_t *)out->data;
        OPJIT_FOR_EACH(i, at, x)
            to[i] = (scalar_t)a * from[at];
    })
    return OPJIT_OK;
}
