/* gpu-mode/reference-kernels#162: the first place took 0.000: half of the work. named: leaves elements of its output unwritten */
#include "opjit.h"

opjit_status scale_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "scale takes a contiguous float32 tensor");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    const float *from = (const float *)x->data;
    float *to = (float *)out->data;
    for (int64_t i = 0; i < (x->numel + 1) / 2; i++)
        to[i] = (float)a * from[i];
    return OPJIT_OK;
}
