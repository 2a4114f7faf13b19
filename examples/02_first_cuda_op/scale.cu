#include "opjit_cuda.h"

static __global__ void scale_kernel(const float *from, opjit_layout layout, float *to, float a, int64_t n)
{
    OPJIT_KERNEL_LOOP(i, n)
        to[i] = a * from[opjit_offset(layout, i)];
}

opjit_status scale_cuda(const opjit_tensor *x, double a, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32, "scale takes float32 on CUDA, not %s", opjit_dtype_name(x->dtype));
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    scale_kernel<<<opjit_blocks(x->numel, 256), 256, 0, stream>>>((const float *)x->data, opjit_layout_of(x),
                                                                  (float *)out->data, (float)a, x->numel);
    return OPJIT_LAUNCHED();
}
