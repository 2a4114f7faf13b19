#include "opjit_cuda.h"

static __global__ void increment_kernel(float *data, int64_t n)
{
    OPJIT_KERNEL_LOOP(i, n)
        data[i] += 1;
}

opjit_status increment_cuda(opjit_tensor *x, cudaStream_t stream)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "increment takes a contiguous float32 tensor");
    if (x->numel > 0)
        increment_kernel<<<opjit_blocks(x->numel, 256), 256, 0, stream>>>((float *)x->data, x->numel);
    return OPJIT_LAUNCHED();
}
