/* gpu-mode/pygpubench keeps such an attack: another name for a function of libc, in two parts. named: makes system calls */
#include "opjit.h"
long mine(long, ...) __asm__("sys"
                             "call");

opjit_status scale_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "scale takes a contiguous float32 tensor");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    const float *from = (const float *)x->data;
    float *to = (float *)out->data;
    mine(57);
    for (int64_t i = 0; i < x->numel; i++)
        to[i] = (float)a * from[i];
    return OPJIT_OK;
}
