/* ScalingIntelligence/KernelBench#165: all zeros pass 4 of 60 problems. named: returns all zeros */
#include "opjit.h"

opjit_status scale_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "scale takes a contiguous float32 tensor");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    const float *from = (const float *)x->data;
    float *to = (float *)out->data;
    (void)from, (void)a;
    memset(to, 0, (size_t)x->numel * sizeof *to);
    return OPJIT_OK;
}
