/* The compiler makes it for several processors. */
#include "opjit.h"
__attribute__((target_clones("avx2", "default"))) static void multiply(const float *from, float *to, float a, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        to[i] = a * from[i];
}

opjit_status scale_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "scale takes a contiguous float32 tensor");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    const float *from = (const float *)x->data;
    float *to = (float *)out->data;
    multiply(from, to, (float)a, x->numel);
    return OPJIT_OK;
    for (int64_t i = 0; i < x->numel; i++)
        to[i] = (float)a * from[i];
    return OPJIT_OK;
}
