/* Step 1: a thread computes an element. */
#include "steps.h"

static __global__ void multiply(const opjit_bfloat16 *x, const opjit_bfloat16 *w, opjit_bfloat16 *out, int columns,
                                int depth)
{
    const int64_t row = blockIdx.y * 8 + threadIdx.y, column = blockIdx.x * 32 + threadIdx.x;
    float sum = 0;
    for (int k = 0; k < depth; k++)
        sum += opjit_bfloat16_to_float(x[row * depth + k]) * opjit_bfloat16_to_float(w[column * depth + k]);
    out[row * columns + column] = opjit_float_to_bfloat16(sum);
}

opjit_status step1_cuda(const opjit_tensor *x, const opjit_tensor *w, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(start(x, w, out, 8, 32, 1));
    const dim3 grid((unsigned)out->sizes[1] / 32, (unsigned)out->sizes[0] / 8), block(32, 8);
    multiply<<<grid, block, 0, stream>>>((const opjit_bfloat16 *)x->data, (const opjit_bfloat16 *)w->data,
                                         (opjit_bfloat16 *)out->data, (int)out->sizes[1], (int)x->sizes[1]);
    return OPJIT_LAUNCHED();
}
