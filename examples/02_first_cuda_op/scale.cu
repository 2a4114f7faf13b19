#include "opjit_cuda.h"

static __global__ void scale_kernel(const float *x, opjit_layout at, float *y, float a, int64_t n)
{
    OPJIT_KERNEL_LOOP(i, n)
        y[i] = a * x[opjit_offset(at, i)];
}

opjit_status scale_cuda(const opjit_tensor *x, double a, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32, "scale takes float32 on CUDA");
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    const float *from = (const float *)x->data;
    float *to = (float *)out->data;
    const int blocks = opjit_blocks(x->numel, 256);
    scale_kernel<<<blocks, 256, 0, stream>>>(from, opjit_layout_of(x), to, (float)a, x->numel);
    return OPJIT_LAUNCHED();
}
