/* Step 6: warp specialization. A warpgroup loads into four stages, and two multiply. A block computes many tiles. */
#include "hopper.h"

#define ROWS 128
#define COLUMNS 256
#define STAGES 4
#define THREADS 384
#define GROUP 16 /* row tiles that take turns before the next columns */

typedef struct stages {
    unsigned char x[STAGES][ROWS * DEPTH * 2];
    unsigned char w[STAGES][COLUMNS * DEPTH * 2];
    opjit_mbarrier full[STAGES], empty[STAGES];
} stages;

/* The size of the product in tiles, and in steps along k. */
typedef struct job {
    int down, across, steps;
} job;

#if OPJIT_HAS_WGMMA

/* The first row and column of a tile. Neighboring blocks have tiles in a square, so that its x and w stay in L2. */
static __device__ int2 place_of(int tile, job j)
{
    const int first = tile / (GROUP * j.across) * GROUP, in_group = tile % (GROUP * j.across);
    const int height = min(GROUP, j.down - first);
    return make_int2((first + in_group % height) * ROWS, in_group / height * COLUMNS);
}

/* Go on to the next stage. After the last one, the phase of all barriers has the other parity. */
static __device__ void advance(int *stage, unsigned *parity)
{
    *stage = (*stage + 1) % STAGES;
    *parity ^= *stage == 0;
}

static __device__ void make_barriers(stages *s)
{
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            opjit_mbarrier_init(&s->full[i], 1);
            opjit_mbarrier_init(&s->empty[i], 2); /* the two warpgroups that multiply */
        }
        opjit_fence_mbarrier_init();
    }
    __syncthreads();
}

/* One thread loads all tiles of the block. */
static __device__ void load_all(stages *s, const opjit_tensor_map *x, const opjit_tensor_map *w, job j)
{
    int stage = 0;
    unsigned parity = 0;
    for (int tile = blockIdx.x; tile < j.down * j.across; tile += gridDim.x) {
        const int2 place = place_of(tile, j);
        for (int step = 0; step < j.steps; step++) {
            opjit_mbarrier_wait(&s->empty[stage], parity ^ 1);
            opjit_mbarrier_arrive_expect_tx(&s->full[stage], sizeof s->x[0] + sizeof s->w[0]);
            opjit_tma_load_2d(s->x[stage], x, &s->full[stage], step * DEPTH, place.x);
            opjit_tma_load_2d(s->w[stage], w, &s->full[stage], step * DEPTH, place.y);
            advance(&stage, &parity);
        }
    }
}

/* Start the products of a stage: 64 rows of x, 256 columns of w, and four times 16 k. */
static __device__ void multiply_tiles(float (&d)[128], const unsigned char *x, const unsigned char *w, bool add)
{
    uint64_t a = opjit_wgmma_descriptor(x, OPJIT_K_MAJOR), b = opjit_wgmma_descriptor(w, OPJIT_K_MAJOR);
    opjit_wgmma_fence();
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        opjit_wgmma_m64n256k16<opjit_bfloat16>(d, a, b, add || k > 0);
        a = opjit_wgmma_next(a, OPJIT_K_MAJOR);
        b = opjit_wgmma_next(b, OPJIT_K_MAJOR);
    }
    opjit_wgmma_commit_group();
}

/* A warpgroup multiplies its 64 rows of a tile. */
static __device__ void sum_tile(float (&d)[128], stages *s, int rows, int steps, int *stage, unsigned *parity)
{
    int before = *stage;
    for (int step = 0; step < steps; step++) {
        opjit_mbarrier_wait(&s->full[*stage], *parity);
        multiply_tiles(d, s->x[*stage] + rows * DEPTH * 2, s->w[*stage], step > 0);
        opjit_wgmma_wait_group<1>(); /* the products of the previous step are ready */
        if (step > 0 && threadIdx.x % 128 == 0)
            opjit_mbarrier_arrive(&s->empty[before]);
        before = *stage;
        advance(stage, parity);
    }
    opjit_wgmma_wait_group<0>();
    if (threadIdx.x % 128 == 0)
        opjit_mbarrier_arrive(&s->empty[before]);
}

static __device__ void multiply_all(stages *s, opjit_bfloat16 *out, int rows, job j)
{
    int stage = 0;
    unsigned parity = 0;
    float d[128];
    for (int tile = blockIdx.x; tile < j.down * j.across; tile += gridDim.x) {
        const int2 place = place_of(tile, j);
        const int64_t columns = (int64_t)j.across * COLUMNS;
        sum_tile(d, s, rows, j.steps, &stage, &parity);
        store_sums(out + (place.x + rows) * columns + place.y, d, columns);
    }
}

#endif

static __global__ void __launch_bounds__(THREADS, 1)
    multiply(const __grid_constant__ opjit_tensor_map x, const __grid_constant__ opjit_tensor_map w,
             opjit_bfloat16 *out, job j)
{
#if OPJIT_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char memory[];
    stages *s = (stages *)memory;
    make_barriers(s);
    if (threadIdx.x < 128) {
        opjit_setmaxnreg_dec<40>();
        if (threadIdx.x == 0)
            load_all(s, &x, &w, j);
    } else {
        opjit_setmaxnreg_inc<232>();
        multiply_all(s, out, threadIdx.x / 128 * 64 - 64, j);
    }
#endif
}

opjit_status step6_cuda(const opjit_tensor *x, const opjit_tensor *w, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(check_hopper());
    OPJIT_TRY(start(x, w, out, ROWS, COLUMNS, DEPTH));
    const int64_t m = x->sizes[0], n = w->sizes[1], k = x->sizes[1];
    const job j = {(int)(m / ROWS), (int)(n / COLUMNS), (int)(k / DEPTH)};
    opjit_tensor_map x_map, w_map;
    int blocks;
    OPJIT_TRY(make_map(&x_map, x, m, k, ROWS));
    OPJIT_TRY(make_map(&w_map, w, n, k, COLUMNS));
    OPJIT_TRY(opjit_multiprocessors(&blocks));
    blocks = blocks < j.down * j.across ? blocks : j.down * j.across;
    OPJIT_CUDA_CHECK(cudaFuncSetAttribute(multiply, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(stages)));
    multiply<<<(unsigned)blocks, THREADS, sizeof(stages), stream>>>(x_map, w_map, (opjit_bfloat16 *)out->data, j);
    return OPJIT_LAUNCHED();
}
