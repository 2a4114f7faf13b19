/* gpu-mode/pygpubench keeps such an attack: code in the section that the linker runs first. named: runs code when it is loaded */
#include "opjit.h"
static void early(void) __attribute__((used));
static void early(void) {}
__asm__(".pushsection .init,\"ax\",@progbits\n call early\n .popsection");

opjit_status scale_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "scale takes a contiguous float32 tensor");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    const float *from = (const float *)x->data;
    float *to = (float *)out->data;
    for (int64_t i = 0; i < x->numel; i++)
        to[i] = (float)a * from[i];
    return OPJIT_OK;
}
