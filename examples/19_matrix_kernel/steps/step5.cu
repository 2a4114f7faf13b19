/* Step 5: TMA and wgmma. A warpgroup loads a tile with one instruction for each matrix, and multiplies it with eight. */
#include "hopper.h"

#define TILE 128
#define THREADS 128

typedef struct tiles {
    unsigned char x[TILE * DEPTH * 2], w[TILE * DEPTH * 2];
    opjit_mbarrier full;
} tiles;

#if OPJIT_HAS_WGMMA

/* Start the products of a tile: 2 x 64 rows of x, 128 columns of w, and four times 16 k. */
static __device__ void multiply_tiles(float (&d)[2][64], const tiles *t, bool add)
{
    opjit_wgmma_fence();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint64_t a = opjit_wgmma_descriptor(t->x + half * 64 * DEPTH * 2, OPJIT_K_MAJOR);
        uint64_t b = opjit_wgmma_descriptor(t->w, OPJIT_K_MAJOR);
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
            opjit_wgmma_m64n128k16<opjit_bfloat16>(d[half], a, b, add || k > 0);
            a = opjit_wgmma_next(a, OPJIT_K_MAJOR);
            b = opjit_wgmma_next(b, OPJIT_K_MAJOR);
        }
    }
    opjit_wgmma_commit_group();
}

/* Add the products of all steps. One thread loads, and all wait for the bytes. */
static __device__ void sum_tiles(float (&d)[2][64], tiles *t, const opjit_tensor_map *x, const opjit_tensor_map *w,
                                 int row, int column, int steps)
{
    for (int step = 0; step < steps; step++) {
        if (threadIdx.x == 0) {
            opjit_mbarrier_arrive_expect_tx(&t->full, sizeof t->x + sizeof t->w);
            opjit_tma_load_2d(t->x, x, &t->full, step * DEPTH, row);
            opjit_tma_load_2d(t->w, w, &t->full, step * DEPTH, column);
        }
        opjit_mbarrier_wait(&t->full, step % 2);
        multiply_tiles(d, t, step > 0);
        opjit_wgmma_wait_group<0>();
        __syncthreads(); /* all warps have read the tiles */
    }
}

#endif

static __global__ void __launch_bounds__(THREADS)
    multiply(const __grid_constant__ opjit_tensor_map x, const __grid_constant__ opjit_tensor_map w,
             opjit_bfloat16 *out, int64_t columns, int steps)
{
#if OPJIT_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char memory[];
    tiles *t = (tiles *)memory;
    const int row = blockIdx.x * TILE, column = blockIdx.y * TILE;
    if (threadIdx.x == 0) {
        opjit_mbarrier_init(&t->full, 1);
        opjit_fence_mbarrier_init();
    }
    __syncthreads();
    float d[2][64];
    sum_tiles(d, t, &x, &w, row, column, steps);
#pragma unroll
    for (int half = 0; half < 2; half++)
        store_sums(out + (row + half * 64) * columns + column, d[half], columns);
#endif
}

opjit_status step5_cuda(const opjit_tensor *x, const opjit_tensor *w, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(check_hopper());
    OPJIT_TRY(start(x, w, out, TILE, TILE, DEPTH));
    const int64_t m = x->sizes[0], n = w->sizes[1], k = x->sizes[1];
    opjit_tensor_map x_map, w_map;
    OPJIT_TRY(make_map(&x_map, x, m, k, TILE));
    OPJIT_TRY(make_map(&w_map, w, n, k, TILE));
    const dim3 grid((unsigned)(m / TILE), (unsigned)(n / TILE));
    multiply<<<grid, THREADS, sizeof(tiles), stream>>>(x_map, w_map, (opjit_bfloat16 *)out->data, n, (int)(k / DEPTH));
    return OPJIT_LAUNCHED();
}
