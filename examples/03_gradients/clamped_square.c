#include "opjit.h"

opjit_status clamped_square_cpu(const opjit_tensor *x, double limit, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "clamped_square takes a contiguous float32 tensor");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    const float *from = (const float *)x->data, bound = (float)limit;
    float *to = (float *)out->data;
    for (int64_t i = 0; i < x->numel; i++)
        to[i] = from[i] * from[i] < bound ? from[i] * from[i] : bound;
    return OPJIT_OK;
}
