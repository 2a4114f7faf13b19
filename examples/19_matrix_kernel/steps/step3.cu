/* Step 3: tensor cores. A block computes 128 x 128 elements, and each of its 8 warps 64 x 32 of them by mma.sync. */
#include "opjit_mma.h"

#include "steps.h"

#define TILE 128
#define DEPTH 32
#define STRIDE (DEPTH + 8) /* elements between rows of a tile, so that 8 pieces of a column are in all banks */
#define THREADS 256

typedef struct tiles {
    opjit_bfloat16 x[TILE * STRIDE], w[TILE * STRIDE];
} tiles;

#if OPJIT_HAS_MMA

/* Copy 128 rows of 32 elements, 16 bytes at a time. */
static __device__ void load(opjit_bfloat16 *tile, const opjit_bfloat16 *from, int64_t depth)
{
    for (int i = threadIdx.x; i < TILE * DEPTH / 8; i += THREADS) {
        const int row = i / 4, column = i % 4 * 8;
        *(uint4 *)(tile + row * STRIDE + column) = *(const uint4 *)(from + row * depth + column);
    }
}

/* A warp adds the products of 64 rows of x and 32 columns of w to its sums, which are 4 x 4 pieces of 16 x 8. */
static __device__ void multiply_tiles(float (&d)[4][4][4], const tiles *t, int row, int column)
{
    const int lane = threadIdx.x % 32;
    for (int k = 0; k < DEPTH; k += 16) {
        uint32_t a[4][4], b[2][4];
        for (int i = 0; i < 4; i++)
            opjit_ldmatrix_x4(a[i], t->x + (row + 16 * i + lane % 16) * STRIDE + k + lane / 16 * 8);
        for (int j = 0; j < 2; j++)
            opjit_ldmatrix_x4(b[j],
                              t->w + (column + 16 * j + lane % 8 + lane / 16 * 8) * STRIDE + k + lane / 8 % 2 * 8);
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) {
                const uint32_t half[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
                opjit_mma_m16n8k16(d[i][j], a[i], half, opjit_bfloat16());
            }
    }
}

#endif

static __global__ void __launch_bounds__(THREADS, 2)
    multiply(const opjit_bfloat16 *x, const opjit_bfloat16 *w, opjit_bfloat16 *out, int64_t columns, int64_t depth)
{
#if OPJIT_HAS_MMA
    __shared__ __align__(16) tiles t;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_row = warp / 4 * 64, warp_column = warp % 4 * 32;
    const int64_t row = blockIdx.x * TILE, column = blockIdx.y * TILE;
    float d[4][4][4] = {};
    for (int64_t k = 0; k < depth; k += DEPTH) {
        load(t.x, x + row * depth + k, depth);
        load(t.w, w + column * depth + k, depth);
        __syncthreads();
        multiply_tiles(d, &t, warp_row, warp_column);
        __syncthreads();
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            const int64_t r = row + warp_row + 16 * i + lane / 4, c = column + warp_column + 8 * j + lane % 4 * 2;
            store_pair(out + r * columns + c, d[i][j][0], d[i][j][1]);
            store_pair(out + (r + 8) * columns + c, d[i][j][2], d[i][j][3]);
        }
#endif
}

opjit_status step3_cuda(const opjit_tensor *x, const opjit_tensor *w, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(start(x, w, out, TILE, TILE, DEPTH));
    const dim3 grid((unsigned)out->sizes[0] / TILE, (unsigned)out->sizes[1] / TILE);
    multiply<<<grid, THREADS, 0, stream>>>((const opjit_bfloat16 *)x->data, (const opjit_bfloat16 *)w->data,
                                           (opjit_bfloat16 *)out->data, out->sizes[1], x->sizes[1]);
    return OPJIT_LAUNCHED();
}
