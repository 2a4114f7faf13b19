/*
 * matmul on Hopper, few rows, where reading w takes the time.
 *
 * Columns of w are the rows of wgmma, so that few rows of x are no waste: a block has 128 columns of w, and 16, 64 or 128
 * rows of x. The blocks of a cluster share the depth. At the end they put their sums into shared memory, and each adds
 * the sums of all for its part of the tile, in a fixed order.
 */
#ifndef MATMUL_NARROW_H
#define MATMUL_NARROW_H

#include "matmul_job.h"

#define NARROW_COLUMNS 128                 /* of w in a tile: 64 of each warpgroup */
#define NARROW_THREADS 288                 /* two warpgroups multiply, a warp loads */
#define NARROW_CLUSTER 8                   /* blocks that share the depth, at most */
#define NARROW_STRIDE (NARROW_COLUMNS + 4) /* floats between rows of sums, so that a warp writes to all banks */
#define NARROW_RESIDENT(rows) ((rows) <= 64 ? 2 : 1) /* blocks on a multiprocessor */

template <int rows>
struct narrow_shared {
    static constexpr int stages = rows == 64 ? 4 : 6;
    unsigned char w[stages][NARROW_COLUMNS * DEPTH * 2];
    unsigned char x[stages][rows * DEPTH * 2];
    opjit_mbarrier full[stages], empty[stages];
};

#if OPJIT_HAS_WGMMA

/* Products of a stage: d += 64 columns of w times the rows of x. */
template <typename element, int rows, opjit_major w_major>
static __device__ void multiply_narrow(float (&d)[rows / 2], const void *w, const void *x, bool add)
{
    uint64_t a = opjit_wgmma_descriptor(w, w_major), b = opjit_wgmma_descriptor(x, OPJIT_K_MAJOR);
    opjit_wgmma_fence();
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        if constexpr (rows == 16)
            opjit_wgmma_m64n16k16<element, w_major>(d, a, b, add || k > 0);
        else if constexpr (rows == 64)
            opjit_wgmma_m64n64k16<element, w_major>(d, a, b, add || k > 0);
        else
            opjit_wgmma_m64n128k16<element, w_major>(d, a, b, add || k > 0);
        a = opjit_wgmma_next(a, w_major);
        b = opjit_wgmma_next(b, OPJIT_K_MAJOR);
    }
    opjit_wgmma_commit_group();
}

/* Load the tiles of some steps: the thread that loads. */
template <int rows, bool by_rows>
static __device__ void load_narrow(narrow_shared<rows> *shared, const opjit_tensor_map *x, const opjit_tensor_map *w,
                                   int64_t row, int64_t column, int64_t partner, int64_t first, int64_t last)
{
    int stage = 0;
    unsigned parity = 0;
    for (int64_t step = first; step < last; step++) {
        opjit_mbarrier *full = &shared->full[stage];
        opjit_mbarrier_wait(&shared->empty[stage], parity ^ 1);
        opjit_mbarrier_arrive_expect_tx(full, sizeof shared->w[0] + sizeof shared->x[0]);
        const int k = (int)(step * DEPTH);
        for (int half = 0; half < 2; half++) {
            const int at = (int)(half ? partner : column);
            opjit_tma_load_2d(shared->w[stage] + half * 64 * DEPTH * 2, w, full, by_rows ? at : k, by_rows ? k : at);
        }
        opjit_tma_load_2d(shared->x[stage], x, full, k, (int)row);
        next_stage(&stage, &parity, narrow_shared<rows>::stages);
    }
}

/* Multiply them, by a warpgroup. The products of a step run while the next one is started. */
template <typename element, int rows, bool by_rows>
static __device__ void sum_narrow(float (&d)[rows / 2], narrow_shared<rows> *shared, int group, int64_t steps)
{
    int stage = 0, before = 0;
    unsigned parity = 0;
    for (int64_t step = 0; step < steps; step++) {
        opjit_mbarrier_wait(&shared->full[stage], parity);
        multiply_narrow<element, rows, by_rows ? OPJIT_MN_MAJOR : OPJIT_K_MAJOR>(d,
                                                                                 shared->w[stage] +
                                                                                     group * 64 * DEPTH * 2,
                                                                                 shared->x[stage], step > 0);
        if (step > 0) {
            opjit_wgmma_wait_group<1>();
            if (threadIdx.x % 128 == 0)
                opjit_mbarrier_arrive(&shared->empty[before]);
        }
        before = stage;
        next_stage(&stage, &parity, narrow_shared<rows>::stages);
    }
    opjit_wgmma_wait_group<0>();
}

/* Add four sums of all blocks of the cluster, in their order. */
static __device__ void add_cluster(float (&z)[4], const float *sums, unsigned splits)
{
    float4 parts[NARROW_CLUSTER];
#pragma unroll
    for (unsigned i = 0; i < NARROW_CLUSTER; i++) /* all are on their way before the first is added */
        if (i < splits)
            parts[i] = opjit_cluster_load((const float4 *)sums, i);
#pragma unroll
    for (unsigned i = 0; i < NARROW_CLUSTER; i++)
        if (i < splits) {
            z[0] += parts[i].x;
            z[1] += parts[i].y;
            z[2] += parts[i].z;
            z[3] += parts[i].w;
        }
}

/* Finish and store this block's rows of the tile. A thread has the same four columns in each of its rows. */
template <typename element, int rows>
static __device__ void finish_narrow(const matmul_job &job, const float *sums, int64_t row, int64_t column, int part,
                                     int splits)
{
    const bool is_silu = job.epilogue == MATMUL_SILU_MULTIPLY;
    const int fours = is_silu ? 16 : 32, c = (int)threadIdx.x % fours * 4, pass = 256 / fours;
    const int existing = job.rows - row < rows ? (int)(job.rows - row) : rows;
    if (column + c >= job.columns)
        return;
    float bias[4], partner[4];
    load_bias<element>(bias, job, column + c);
    load_bias<element>(partner, job, column + c + job.up);
    for (int r = (int)threadIdx.x / fours + part * pass; r < existing; r += pass * splits) {
        float z[4] = {bias[0], bias[1], bias[2], bias[3]}, up[4] = {partner[0], partner[1], partner[2], partner[3]};
        const float *at = sums + r * NARROW_STRIDE + c;
        add_cluster(z, at, (unsigned)splits);
        if (is_silu)
            add_cluster(up, at + NARROW_COLUMNS / 2, (unsigned)splits);
        finish_four<element>(job, z, up, row + r, column + c);
    }
}

#endif

template <typename element, int rows, bool by_rows>
static __global__ void __launch_bounds__(NARROW_THREADS, NARROW_RESIDENT(rows))
    matmul_narrow(const __grid_constant__ opjit_tensor_map x, const __grid_constant__ opjit_tensor_map w,
                  const __grid_constant__ matmul_job job)
{
#if OPJIT_HAS_WGMMA
    constexpr int stages = narrow_shared<rows>::stages;
    extern __shared__ __align__(1024) unsigned char memory[];
    narrow_shared<rows> *shared = (narrow_shared<rows> *)memory;
    const bool is_silu = job.epilogue == MATMUL_SILU_MULTIPLY;
    const int columns = columns_of_tile(job, NARROW_COLUMNS);
    const unsigned rank = opjit_cluster_rank(), splits = gridDim.x;
    const int64_t column = (int64_t)blockIdx.y * columns, row = (int64_t)blockIdx.z * rows;
    const int64_t steps = (job.depth + DEPTH - 1) / DEPTH;
    const int64_t first = steps * rank / splits, last = steps * (rank + 1) / splits;
    if (threadIdx.x == 256) {
        opjit_prefetch_tensor_map(&x);
        opjit_prefetch_tensor_map(&w);
        for (int i = 0; i < stages; i++) {
            opjit_mbarrier_init(&shared->full[i], 1);
            opjit_mbarrier_init(&shared->empty[i], 2);
        }
        opjit_fence_mbarrier_init();
    }
    __syncthreads();

    float d[rows / 2] = {};
    const int group = (int)threadIdx.x / 128;
    if (threadIdx.x == 256)
        load_narrow<rows, by_rows>(shared, &x, &w, row, column, column + (is_silu ? job.up : 64), first, last);
    if (group < 2)
        sum_narrow<element, rows, by_rows>(d, shared, group, last - first);
    __syncthreads(); /* all tiles are read: the sums take their place, a row of x after the other */

    float *sums = (float *)memory;
    if (group < 2) {
        const int lane = (int)threadIdx.x % 32, line = group * 64 + (int)threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < rows / 2; i++)
            sums[(i / 4 * 8 + lane % 4 * 2 + i % 2) * NARROW_STRIDE + line + i / 2 % 2 * 8] = d[i];
    }
    if (splits > 1)
        opjit_cluster_sync();
    else
        __syncthreads();
    if (group < 2)
        finish_narrow<element, rows>(job, sums, row, column, (int)rank, (int)splits);
    opjit_cluster_sync(); /* no block ends while another one reads its sums */
#endif
}

#endif
