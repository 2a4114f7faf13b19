#include "opjit_cuda.h"
#include "opjit_random.h"

/* Keep and scale element i if its random number is below `keep`. The seed is in GPU memory. */
static __global__ void drop_kernel(const float *from, opjit_layout layout, float *to, float keep, const uint64_t *seed,
                                   uint64_t *kept, int64_t n)
{
    if (kept && blockIdx.x == 0 && threadIdx.x == 0)
        *kept = *seed;
    OPJIT_KERNEL_LOOP(i, n)
        to[i] = opjit_uniform(opjit_philox(*seed, i, 0).word[0]) < keep ? from[opjit_offset(layout, i)] / keep : 0;
}

static opjit_status drop(const opjit_tensor *x, double p, const uint64_t *seed, opjit_tensor *out, uint64_t *kept,
                         cudaStream_t stream)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && p >= 0 && p < 1, "dropout takes float32, and p from 0 to less than 1");
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    drop_kernel<<<opjit_blocks(x->numel, 256), 256, 0, stream>>>((const float *)x->data, opjit_layout_of(x),
                                                                 (float *)out->data, (float)(1 - p), seed, kept,
                                                                 x->numel);
    return OPJIT_LAUNCHED();
}

opjit_status dropout_cuda(const opjit_tensor *x, double p, const uint64_t *seed, opjit_tensor *out, opjit_tensor *kept,
                          cudaStream_t stream)
{
    OPJIT_TRY(opjit_empty(kept, 0, NULL, OPJIT_INT64, x));
    return drop(x, p, seed, out, (uint64_t *)kept->data, stream);
}

opjit_status dropout_again_cuda(const opjit_tensor *x, double p, const opjit_tensor *seed, opjit_tensor *out,
                                cudaStream_t stream)
{
    return drop(x, p, (const uint64_t *)seed->data, out, NULL, stream);
}
