#include "opjit_cuda.h"

static __global__ void all_reduce_kernel(const int32_t *from, int32_t *sum, int64_t n)
{
    int32_t own = 0;
    OPJIT_KERNEL_LOOP(i, n)
        own += from[i];
    own = __reduce_add_sync(0xffffffffu, own);
    if (threadIdx.x % 32 == 0)
        atomicAdd(sum, own);
}

opjit_status all_reduce_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{
    const int64_t one = 1;
    int processors, blocks = opjit_blocks(x->numel, 256);
    OPJIT_CHECK(x->dtype == OPJIT_INT32, "all_reduce takes int32, not %s", opjit_dtype_name(x->dtype));
    OPJIT_CHECK(x->contiguous, "all_reduce takes a contiguous tensor on CUDA; call .contiguous() on it");
    OPJIT_TRY(opjit_empty(out, 1, &one, x->dtype, x));
    OPJIT_TRY(opjit_multiprocessors(&processors));
    OPJIT_CUDA_CHECK(cudaMemsetAsync(out->data, 0, sizeof(int32_t), stream));
    if (blocks > 8 * processors)
        blocks = 8 * processors;
    all_reduce_kernel<<<blocks, 256, 0, stream>>>((const int32_t *)x->data, (int32_t *)out->data, x->numel);
    return OPJIT_LAUNCHED();
}
