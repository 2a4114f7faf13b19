/*
 * rms_norm_rope on CUDA: one warp for the row of each head, so the sum of squares does not need shared memory. The
 * second read of the row hits the cache.
 */
#include "opjit_reduce.h"
#include "rms_norm_rope.h"

#define WARPS 8 /* rows in a block */

static __global__ void rms_norm_rope_kernel(const float *x, const float *weight, const float *cosine, const float *sine,
                                            float *out, float eps, int64_t count, int heads, int size)
{
    int lane = (int)threadIdx.x, half = size / 2;
    for (int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.y; row < count; row += (int64_t)gridDim.x * WARPS) {
        const float *from = x + row * size, *c = cosine + row / heads * half, *s = sine + row / heads * half;
        float *to = out + row * size, sum = 0;
        for (int i = lane; i < size; i += 32)
            sum += from[i] * from[i];
        float scale = rsqrtf(opjit_warp_reduce(sum, opjit_add()) / (float)size + eps);
        for (int i = lane; i < half; i += 32) {
            float a = from[i] * scale * weight[i], b = from[half + i] * scale * weight[half + i];
            to[i] = a * c[i] - b * s[i];
            to[half + i] = b * c[i] + a * s[i];
        }
    }
}

opjit_status rms_norm_rope_cuda(const opjit_tensor *x, const opjit_tensor *weight, const opjit_tensor *cosine,
                                const opjit_tensor *sine, double eps, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(check(x, weight, cosine, sine));
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    int64_t count = x->sizes[0] * x->sizes[1];
    rms_norm_rope_kernel<<<opjit_blocks(count, WARPS), dim3(32, WARPS), 0, stream>>>((const float *)x->data,
                                                                                     (const float *)weight->data,
                                                                                     (const float *)cosine->data,
                                                                                     (const float *)sine->data,
                                                                                     (float *)out->data, (float)eps,
                                                                                     count, (int)x->sizes[1],
                                                                                     (int)x->sizes[2]);
    return OPJIT_LAUNCHED();
}
