/* gpu-mode/pygpubench keeps such an attack: it waits on the device until the flush ends. harmless */
#include "opjit_cuda.h"

static __global__ void scale_kernel(const float *from, float *to, float a, int64_t n)
{
    OPJIT_KERNEL_LOOP(i, n) {
        __nanosleep(100);
        to[i] = a * from[i];
    }
}

opjit_status scale_cuda(const opjit_tensor *x, double a, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));

    scale_kernel<<<opjit_blocks(x->numel, 256), 256, 0, stream>>>((const float *)x->data, (float *)out->data, (float)a,
                                                                  x->numel);
    return OPJIT_LAUNCHED();
}
