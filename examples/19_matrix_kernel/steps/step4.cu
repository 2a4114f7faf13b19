/* Step 4: a pipeline. cp.async loads the next three tiles while the warps multiply one. */
#include "opjit_mma.h"

#include "steps.h"

#define TILE 128
#define DEPTH 32
#define STRIDE (DEPTH + 8) /* elements between rows of a tile, so that 8 pieces of a column are in all banks */
#define STAGES 4
#define THREADS 256

typedef struct tiles {
    opjit_bfloat16 x[TILE * STRIDE], w[TILE * STRIDE];
} tiles;

#if OPJIT_HAS_MMA

/* Start to copy 128 rows of 32 elements, 16 bytes at a time. */
static __device__ void load(opjit_bfloat16 *tile, const opjit_bfloat16 *from, int64_t depth)
{
    for (int i = threadIdx.x; i < TILE * DEPTH / 8; i += THREADS) {
        const int row = i / 4, column = i % 4 * 8;
        opjit_cp_async(tile + row * STRIDE + column, from + row * depth + column, 16);
    }
}

/* Start to load a step into its stage. After the last step, the group is empty, so that there is always one a step. */
static __device__ void load_step(tiles *stages, const opjit_bfloat16 *x, const opjit_bfloat16 *w, int step,
                                 int64_t depth)
{
    const int64_t k = (int64_t)step * DEPTH;
    if (k < depth) {
        load(stages[step % STAGES].x, x + k, depth);
        load(stages[step % STAGES].w, w + k, depth);
    }
    opjit_cp_async_commit_group();
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

/* Add the products of all steps: while a tile is multiplied, the next ones are on their way. */
static __device__ void sum_tiles(float (&d)[4][4][4], tiles *stages, const opjit_bfloat16 *x, const opjit_bfloat16 *w,
                                 int64_t depth)
{
    const int warp = threadIdx.x / 32;
    for (int step = 0; step < STAGES - 1; step++)
        load_step(stages, x, w, step, depth);
    for (int step = 0; step < depth / DEPTH; step++) {
        opjit_cp_async_wait_group<STAGES - 2>(); /* this thread's copies of the step have arrived */
        __syncthreads(); /* the copies of all threads have, and all warps have read the previous tile */
        load_step(stages, x, w, step + STAGES - 1, depth);
        multiply_tiles(d, &stages[step % STAGES], warp / 4 * 64, warp % 4 * 32);
    }
}

#endif

static __global__ void __launch_bounds__(THREADS, 2)
    multiply(const opjit_bfloat16 *x, const opjit_bfloat16 *w, opjit_bfloat16 *out, int64_t columns, int64_t depth)
{
#if OPJIT_HAS_MMA
    extern __shared__ __align__(16) unsigned char memory[];
    tiles *stages = (tiles *)memory;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_row = warp / 4 * 64, warp_column = warp % 4 * 32;
    const int64_t row = blockIdx.x * TILE, column = blockIdx.y * TILE;
    float d[4][4][4] = {};
    sum_tiles(d, stages, x + row * depth, w + column * depth, depth);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            const int64_t r = row + warp_row + 16 * i + lane / 4, c = column + warp_column + 8 * j + lane % 4 * 2;
            store_pair(out + r * columns + c, d[i][j][0], d[i][j][1]);
            store_pair(out + (r + 8) * columns + c, d[i][j][2], d[i][j][3]);
        }
#endif
}

opjit_status step4_cuda(const opjit_tensor *x, const opjit_tensor *w, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(start(x, w, out, TILE, TILE, DEPTH));
    const dim3 grid((unsigned)out->sizes[0] / TILE, (unsigned)out->sizes[1] / TILE);
    const size_t bytes = STAGES * sizeof(tiles);
    OPJIT_CUDA_CHECK(cudaFuncSetAttribute(multiply, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    multiply<<<grid, THREADS, bytes, stream>>>((const opjit_bfloat16 *)x->data, (const opjit_bfloat16 *)w->data,
                                               (opjit_bfloat16 *)out->data, out->sizes[1], x->sizes[1]);
    return OPJIT_LAUNCHED();
}
