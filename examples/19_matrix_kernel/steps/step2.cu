/* Step 2: a block computes 32 x 32 elements, from tiles in shared memory. */
#include "steps.h"

#define TILE 32

static __global__ void multiply(const opjit_bfloat16 *x, const opjit_bfloat16 *w, opjit_bfloat16 *out, int columns,
                                int depth)
{
    __shared__ float x_tile[TILE][TILE], w_tile[TILE][TILE + 1]; /* + 1: a column of the tile is in all banks */
    const int i = threadIdx.y, j = threadIdx.x;
    const int64_t row = blockIdx.y * TILE, column = blockIdx.x * TILE;
    float sum = 0;
    for (int k = 0; k < depth; k += TILE) {
        x_tile[i][j] = opjit_bfloat16_to_float(x[(row + i) * depth + k + j]);
        w_tile[i][j] = opjit_bfloat16_to_float(w[(column + i) * depth + k + j]);
        __syncthreads();
        for (int l = 0; l < TILE; l++)
            sum += x_tile[i][l] * w_tile[j][l];
        __syncthreads();
    }
    out[(row + i) * columns + column + j] = opjit_float_to_bfloat16(sum);
}

opjit_status step2_cuda(const opjit_tensor *x, const opjit_tensor *w, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(start(x, w, out, TILE, TILE, TILE));
    const dim3 grid((unsigned)out->sizes[1] / TILE, (unsigned)out->sizes[0] / TILE), block(TILE, TILE);
    multiply<<<grid, block, 0, stream>>>((const opjit_bfloat16 *)x->data, (const opjit_bfloat16 *)w->data,
                                         (opjit_bfloat16 *)out->data, (int)out->sizes[1], (int)x->sizes[1]);
    return OPJIT_LAUNCHED();
}
