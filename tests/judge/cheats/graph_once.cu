/* gpu-mode/pygpubench keeps such an attack: a graph captured once. named: makes streams, events or graphs */
#include "opjit_cuda.h"

static __global__ void scale_kernel(const float *from, float *to, float a, int64_t n)
{
    OPJIT_KERNEL_LOOP(i, n)
        to[i] = a * from[i];
}

opjit_status scale_cuda(const opjit_tensor *x, double a, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    scale_kernel<<<opjit_blocks(x->numel, 256), 256, 0, stream>>>((const float *)x->data, (float *)out->data, (float)a,
                                                                  x->numel);
    return OPJIT_LAUNCHED();
}
