/*
 * read16: read a tensor with plain 16-byte loads and keep nothing. The bandwidth that a reduction can hope for.
 *
 * Every thread folds what it reads into one word and writes it only if it is a value that random data will not give, so
 * that the compiler can leave no load out.
 */
#include "opjit_cuda.h"

static __global__ void __launch_bounds__(512) read_kernel(const uint4 *from, int64_t n, unsigned *never)
{
    unsigned fold = 0;
#pragma unroll 4
    OPJIT_KERNEL_LOOP(i, n) {
        uint4 v = from[i];
        fold |= v.x & v.y & v.z & v.w;
    }
    if (fold == 0x12345678u)
        *never = fold;
}

opjit_status read16_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{
    int processors;
    OPJIT_CHECK(x->contiguous && x->dtype == OPJIT_FLOAT32 && (uintptr_t)x->data % 16 == 0,
                "read16 takes contiguous float32 aligned to 16 bytes, not %s", opjit_dtype_name(x->dtype));
    OPJIT_TRY(opjit_empty(out, 0, NULL, OPJIT_INT32, x));
    OPJIT_TRY(opjit_multiprocessors(&processors));
    read_kernel<<<processors * 4, 512, 0, stream>>>((const uint4 *)x->data, x->numel / 4, (unsigned *)out->data);
    return OPJIT_LAUNCHED();
}
