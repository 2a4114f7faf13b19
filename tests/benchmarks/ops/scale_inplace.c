/* scale_inplace: multiply every element of a contiguous float32 tensor by a. */
#include "opjit.h"

opjit_status scale_inplace_cpu(opjit_tensor *x, double a)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32, "scale_inplace takes float32, not %s", opjit_dtype_name(x->dtype));
    OPJIT_CHECK(x->contiguous, "scale_inplace takes a contiguous tensor");
    float *data = (float *)x->data;
    for (int64_t i = 0; i < x->numel; i++)
        data[i] *= (float)a;
    return OPJIT_OK;
}
