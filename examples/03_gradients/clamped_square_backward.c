#include "opjit.h"

opjit_status clamped_square_backward_cpu(const opjit_tensor *grad, const opjit_tensor *x, double limit,
                                         opjit_tensor *out)
{
    opjit_tensor dense; /* grad can have any strides, for example 0 behind a sum */
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "clamped_square takes a contiguous float32 tensor");
    OPJIT_TRY(opjit_contiguous(&dense, grad));
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    const float *from = (const float *)x->data, *weights = (const float *)dense.data, bound = (float)limit;
    float *to = (float *)out->data;
    for (int64_t i = 0; i < x->numel; i++)
        to[i] = from[i] * from[i] < bound ? 2 * from[i] * weights[i] : 0;
    return OPJIT_OK;
}
