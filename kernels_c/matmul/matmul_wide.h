/*
 * matmul on Hopper, many rows.
 *
 * A pair of blocks, a cluster, has neighboring tiles of 128 rows of x and the same 256 columns of w. One thread of a block
 * loads tiles of 64 k by TMA into a ring of WIDE_STAGES: x for its own block, and half of w for both. Two warpgroups
 * multiply 64 x 256 each by wgmma. A stage goes through two barriers: `full` when its bytes have arrived, and `empty`
 * when both warpgroups of both blocks have read it. The blocks stay for all tiles, and load the next one's stages while
 * TMA stores the last one.
 */
#ifndef MATMUL_WIDE_H
#define MATMUL_WIDE_H

#include "matmul_job.h"

#define WIDE_ROWS 128    /* of x in a tile */
#define WIDE_COLUMNS 256 /* of w in a tile */
#define WIDE_STAGES 4
#define WIDE_THREADS 384 /* a warpgroup loads, two multiply */
#define WIDE_GROUP 8     /* pairs of row tiles that take turns before the next column tile, so that w stays in L2 */
#define CHUNK 64         /* columns that a warpgroup stores at a time */

typedef struct wide_shared {
    unsigned char x[WIDE_STAGES][WIDE_ROWS * DEPTH * 2];
    unsigned char w[WIDE_STAGES][WIDE_COLUMNS * DEPTH * 2];
    unsigned char out[2][2][64 * CHUNK * 2]; /* two chunks for each warpgroup */
    opjit_mbarrier full[WIDE_STAGES], empty[WIDE_STAGES];
} wide_shared;

/* A tile's first row and first column of out. */
typedef struct wide_place {
    int64_t row, column;
} wide_place;

static __device__ wide_place wide_place_of(int64_t tile, int64_t pairs, int64_t across, int columns)
{
    const int64_t group = tile / (WIDE_GROUP * across), in_group = tile % (WIDE_GROUP * across);
    const int64_t left = pairs - group * WIDE_GROUP, height = left < WIDE_GROUP ? left : WIDE_GROUP;
    wide_place place;
    place.row = (group * WIDE_GROUP + in_group % height) * 2 * WIDE_ROWS;
    place.column = in_group / height * columns;
    return place;
}

#if OPJIT_HAS_WGMMA

/* Half of w's columns of a stage, for both blocks of the pair. */
template <bool by_rows>
static __device__ void load_half(void *shared, const opjit_tensor_map *w, opjit_mbarrier *full, int64_t column,
                                 int64_t k)
{
    const uint16_t both = 3;
    if constexpr (by_rows) { /* 64 columns of 64 rows in a box */
        opjit_tma_load_2d_multicast(shared, w, full, (int)column, (int)k, both);
        opjit_tma_load_2d_multicast((char *)shared + 64 * DEPTH * 2, w, full, (int)column + 64, (int)k, both);
    } else {
        opjit_tma_load_2d_multicast(shared, w, full, (int)k, (int)column, both);
    }
}

/* Products of a stage: d += 64 rows of x times 256 columns of w. */
template <typename element, bool by_rows>
static __device__ void multiply_wide(float (&d)[128], const void *x, const void *w, bool add)
{
    constexpr opjit_major w_major = by_rows ? OPJIT_MN_MAJOR : OPJIT_K_MAJOR;
    uint64_t a = opjit_wgmma_descriptor(x, OPJIT_K_MAJOR), b = opjit_wgmma_descriptor(w, w_major);
    opjit_wgmma_fence();
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        opjit_wgmma_m64n256k16<element, OPJIT_K_MAJOR, w_major>(d, a, b, add || k > 0);
        a = opjit_wgmma_next(a, OPJIT_K_MAJOR);
        b = opjit_wgmma_next(b, w_major);
    }
    opjit_wgmma_commit_group();
}

/* Add neighboring columns of bias to the pairs of a chunk: d[4 j] to d[4 j + 3] are columns 8 j and 8 j + 1 of two rows. */
template <typename element>
static __device__ void add_bias(float *d, const element *bias, int columns)
{
#pragma unroll
    for (int j = 0; j < CHUNK / 8; j++)
        if (8 * j < columns) {
            const neighbors<element, 2> pair = *(const neighbors<element, 2> *)(bias + 8 * j);
            d[4 * j] += number(pair.at[0]);
            d[4 * j + 1] += number(pair.at[1]);
            d[4 * j + 2] += number(pair.at[0]);
            d[4 * j + 3] += number(pair.at[1]);
        }
}

/* Add the residual's pairs in two rows, of which `rows` exist. */
template <typename element>
static __device__ void add_residual(float *d, const element *residual, int64_t eight_rows, int columns, int rows)
{
    neighbors<element, 2> pairs[CHUNK / 8][2];
#pragma unroll
    for (int j = 0; j < CHUNK / 8; j++) /* all are on their way before the first is added */
#pragma unroll
        for (int below = 0; below < 2; below++)
            if (8 * j < columns && below < rows)
                pairs[j][below] = *(const neighbors<element, 2> *)(residual + below * eight_rows + 8 * j);
#pragma unroll
    for (int j = 0; j < CHUNK / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (8 * j < columns && i / 2 < rows)
                d[4 * j + i] += number(pairs[j][i / 2].at[i % 2]);
}

/* Finish a chunk: the pairs in d[0] to d[31] from (row, column) on, with their partners from d[64] on. */
template <typename element>
static __device__ void finish_chunk(float (&d)[128], const matmul_job &job, int64_t row, int64_t column)
{
    const int64_t left = job.columns - column, below = job.rows - row;
    const int columns = left < CHUNK ? (int)left : CHUNK, rows = below > 8 ? 2 : below > 0 ? 1 : 0;
    if (job.bias) {
        add_bias(d, (const element *)job.bias + column, columns);
        if (job.epilogue == MATMUL_SILU_MULTIPLY)
            add_bias(d + 64, (const element *)job.bias + column + job.up, columns);
    }
    activate<CHUNK / 2>(d, d + 64, job.epilogue);
    if (job.residual)
        add_residual(d, (const element *)job.residual + row * job.residual_row + column, 8 * job.residual_row, columns,
                     rows);
}

/* Store a warpgroup's 64 rows in chunks of columns. TMA stores a chunk while the next one is finished. d is lost. */
template <typename element>
static __device__ void store_wide(float (&d)[128], const matmul_job &job, const opjit_tensor_map *out,
                                  unsigned char (*staging)[64 * CHUNK * 2], int64_t row, int64_t column, int group)
{
    const int thread = (int)threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int columns = columns_of_tile(job, WIDE_COLUMNS);
    const bool is_plain = job.epilogue == MATMUL_NONE && !job.bias && !job.residual;
#pragma unroll 1
    for (int chunk = 0; chunk < columns / CHUNK; chunk++) {
        unsigned char *to = staging[chunk % 2];
        if (!is_plain)
            finish_chunk<element>(d, job, row + 16 * warp + lane / 4, column + chunk * CHUNK + lane % 4 * 2);
        if (thread == 0)
            opjit_tma_wait_group_read<1>();
        opjit_named_barrier(1 + group, 128);
#pragma unroll
        for (int j = 0; j < CHUNK / 16; j++) {
            const float *eight = d + j * 8;
            const uint32_t words[4] = {pair_of<element>(eight[0], eight[1]), pair_of<element>(eight[2], eight[3]),
                                       pair_of<element>(eight[4], eight[5]), pair_of<element>(eight[6], eight[7])};
            const unsigned line = (unsigned)(16 * warp + lane % 16), piece = (unsigned)(2 * j + lane / 16);
            opjit_stmatrix_x4(to + opjit_swizzled_128(line, piece), words);
        }
        opjit_fence_proxy_async();
        opjit_named_barrier(1 + group, 128);
        if (thread == 0) {
            opjit_tma_store_2d(out, to, (int)column + chunk * CHUNK, (int)row);
            opjit_tma_commit_group();
        }
#pragma unroll
        for (int i = 0; i < 128 - CHUNK / 2; i++) /* the next chunk; registers have no index */
            d[i] = d[i + CHUNK / 2];
    }
}

#endif

template <typename element, bool by_rows>
static __global__ void __launch_bounds__(WIDE_THREADS, 1)
    matmul_wide(const __grid_constant__ opjit_tensor_map x, const __grid_constant__ opjit_tensor_map w,
                const __grid_constant__ opjit_tensor_map out, const __grid_constant__ matmul_job job)
{
#if OPJIT_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char memory[];
    wide_shared *shared = (wide_shared *)memory;
    const unsigned rank = opjit_cluster_rank();
    const int group = (int)threadIdx.x / 128;
    const int columns = columns_of_tile(job, WIDE_COLUMNS);
    const int64_t pairs = (job.rows + 2 * WIDE_ROWS - 1) / (2 * WIDE_ROWS);
    const int64_t across = (job.columns + columns - 1) / columns, tiles = pairs * across;
    const int64_t steps = (job.depth + DEPTH - 1) / DEPTH;
    if (threadIdx.x == 0) {
        for (int i = 0; i < WIDE_STAGES; i++) {
            opjit_mbarrier_init(&shared->full[i], 1);
            opjit_mbarrier_init(&shared->empty[i], 4); /* two warpgroups of two blocks */
        }
        opjit_fence_mbarrier_init();
    }
    opjit_cluster_sync();

    int stage = 0;
    unsigned parity = 0;
    if (group == 0) {
        opjit_setmaxnreg_dec<40>();
        if (threadIdx.x == 0)
            for (int64_t tile = blockIdx.x / 2; tile < tiles; tile += gridDim.x / 2) {
                const wide_place place = wide_place_of(tile, pairs, across, columns);
                const int64_t half = place.column + rank * (columns == WIDE_COLUMNS ? WIDE_COLUMNS / 2 : job.up);
                for (int64_t step = 0; step < steps; step++) {
                    opjit_mbarrier_wait(&shared->empty[stage], parity ^ 1);
                    opjit_mbarrier *full = &shared->full[stage];
                    opjit_mbarrier_arrive_expect_tx(full, sizeof shared->x[0] + sizeof shared->w[0]);
                    opjit_tma_load_2d(shared->x[stage], &x, full, (int)(step * DEPTH),
                                      (int)(place.row + rank * WIDE_ROWS));
                    load_half<by_rows>(shared->w[stage] + rank * (sizeof shared->w[0] / 2), &w, full, half,
                                       step * DEPTH);
                    next_stage(&stage, &parity, WIDE_STAGES);
                }
            }
    } else {
        opjit_setmaxnreg_inc<232>();
        float d[128];
        const bool arrives = threadIdx.x % 128 < 2; /* one thread for each block */
        const unsigned peer = threadIdx.x % 128;
        for (int64_t tile = blockIdx.x / 2; tile < tiles; tile += gridDim.x / 2) {
            const wide_place place = wide_place_of(tile, pairs, across, columns);
            int before = stage;
            for (int64_t step = 0; step < steps; step++) {
                opjit_mbarrier_wait(&shared->full[stage], parity);
                multiply_wide<element, by_rows>(d, shared->x[stage] + (group - 1) * 64 * DEPTH * 2, shared->w[stage],
                                                step > 0);
                if (step > 0) {
                    opjit_wgmma_wait_group<1>();
                    if (arrives)
                        opjit_mbarrier_arrive_cluster(&shared->empty[before], peer);
                }
                before = stage;
                next_stage(&stage, &parity, WIDE_STAGES);
            }
            opjit_wgmma_wait_group<0>();
            if (arrives)
                opjit_mbarrier_arrive_cluster(&shared->empty[before], peer);
            const int64_t row = place.row + rank * WIDE_ROWS + (group - 1) * 64;
            store_wide<element>(d, job, &out, shared->out[group - 1], row, place.column, group);
        }
        if (threadIdx.x % 128 == 0)
            opjit_tma_wait_group_read<0>();
    }
    opjit_cluster_sync(); /* no block ends while its pair can still write to its memory */
#endif
}

#endif
