/*
 * matmul on any GPU from sm_80 on, and for what TMA cannot read: tiles by cp.async, products by mma.sync.
 *
 * A matrix that cp.async cannot read 16 bytes at a time is loaded by element, with any strides.
 */
#ifndef MATMUL_SYNC_H
#define MATMUL_SYNC_H

#include "matmul_job.h"

#define SYNC_ROWS 128
#define SYNC_COLUMNS 128
#define SYNC_DEPTH 32
#define SYNC_STAGES 4
#define SYNC_THREADS 256               /* 2 x 4 warps with 64 x 32 elements each */
#define SYNC_X_STRIDE (SYNC_DEPTH + 8) /* elements between rows: 8 rows use all banks */
#define SYNC_W_STRIDE (SYNC_COLUMNS + 8)
#define SYNC_SUMS_STRIDE (SYNC_COLUMNS + 4) /* floats between rows of sums */

template <typename element, bool by_rows>
struct sync_tile {
    element x[SYNC_ROWS * SYNC_X_STRIDE];
    element w[by_rows ? SYNC_DEPTH * SYNC_W_STRIDE : SYNC_COLUMNS * SYNC_X_STRIDE];
};

#if OPJIT_HAS_MMA

/* A column of w for column j of a tile: for silu_multiply, 16 columns and their partners follow each other. */
static __device__ int64_t sync_column(const matmul_job &job, int64_t column, int j)
{
    if (job.epilogue != MATMUL_SILU_MULTIPLY)
        return column + j;
    return column + j / 32 * 16 + j % 16 + (j % 32 < 16 ? 0 : job.up);
}

/* Is there such a column of w? */
static __device__ bool is_column(const matmul_job &job, int64_t column)
{
    return column < job.columns || (column >= job.up && column < job.columns + job.up);
}

/* 8 elements that a thread loads in each step. */
template <typename element>
struct sync_piece {
    const element *from;
    int to;                   /* its place in the tile */
    int64_t between, advance; /* strides: between the 8, and to the next step */
    int64_t left;             /* elements along k that exist from here on */
    int64_t count;            /* elements that exist, at most */
};

/* A piece of a matrix that has rows of SYNC_DEPTH elements along k in the tile. `index` is its row that exists, or -1. */
template <typename element>
static __device__ sync_piece<element> piece_along_k(const void *matrix, int64_t index, int64_t stride, int64_t between,
                                                    int64_t depth, int r)
{
    const int c = (int)threadIdx.x % (SYNC_DEPTH / 8) * 8;
    const sync_piece<element> piece = {(const element *)matrix + (index < 0 ? 0 : index * stride + c * between),
                                       r * SYNC_X_STRIDE + c,
                                       between,
                                       SYNC_DEPTH * between,
                                       index < 0 ? 0 : depth - c,
                                       8};
    return piece;
}

/* Load a piece, with zeros for what does not exist, and go on to the next step. */
template <typename element, bool along_k>
static __device__ void load_piece(element *tile, sync_piece<element> *piece, bool is_packed)
{
    int64_t existing = along_k || piece->left <= 0 ? piece->left : piece->count;
    existing = existing < 0 ? 0 : existing > 8 ? 8 : existing;
    if (is_packed && existing % 8 == 0) { /* all 8 or none: it reads 16 bytes, also for fewer */
        opjit_cp_async(tile + piece->to, piece->from, (int)existing * 2);
    } else {
        const element zero = {0};
        for (int i = 0; i < 8; i++)
            tile[piece->to + i] = i < existing ? piece->from[i * piece->between] : zero;
    }
    piece->left -= SYNC_DEPTH;
    if (piece->left > 0)
        piece->from += piece->advance;
}

/* What a thread loads in a step: two pieces of x, and two of w. */
template <typename element, bool by_rows>
struct sync_loads {
    sync_piece<element> x[2], w[2];

    __device__ sync_loads(const matmul_job &job, int64_t row, int64_t column)
    {
        for (int i = 0; i < 2; i++) {
            const int r = (int)threadIdx.x / (SYNC_DEPTH / 8) + i * SYNC_ROWS / 2;
            x[i] =
                piece_along_k<element>(job.x, row + r < job.rows ? row + r : -1, job.x_row, job.x_depth, job.depth, r);
            const int64_t c = sync_column(job, column, r);
            w[i] = piece_along_k<element>(job.w, is_column(job, c) ? c : -1, job.w_column, job.w_depth, job.depth, r);
        }
        if (by_rows)
            for (int i = 0; i < 2; i++) { /* 16 threads load a row of w */
                const int k = (int)threadIdx.x / 16 + i * SYNC_DEPTH / 2, j = (int)threadIdx.x % 16 * 8;
                const int64_t c = sync_column(job, column, j),
                              end = c < job.columns ? job.columns : job.columns + job.up;
                const int64_t count = is_column(job, c) ? end - c : 0;
                const sync_piece<element> piece = {(const element *)job.w +
                                                       (count > 0 && k < job.depth ? k * job.w_depth + c : 0),
                                                   k * SYNC_W_STRIDE + j,
                                                   1,
                                                   SYNC_DEPTH * job.w_depth,
                                                   count > 0 ? job.depth - k : 0,
                                                   count};
                w[i] = piece;
            }
    }

    __device__ void step(sync_tile<element, by_rows> *tile, bool packed_x, bool packed_w)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            load_piece<element, true>(tile->x, &x[i], packed_x);
            load_piece<element, !by_rows>(tile->w, &w[i], packed_w);
        }
        opjit_cp_async_commit_group();
    }
};

/* Products of a step: a warp's 64 x 32 elements. */
template <typename element, bool by_rows>
static __device__ void multiply_sync(float (&d)[4][4][4], const sync_tile<element, by_rows> *tile, int row, int column)
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < SYNC_DEPTH; k += 16) {
        uint32_t a[4][4], b[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            opjit_ldmatrix_x4(a[i], tile->x + (row + 16 * i + lane % 16) * SYNC_X_STRIDE + k + lane / 16 * 8);
#pragma unroll
        for (int j = 0; j < 2; j++) { /* 16 columns: both halves of k of the first 8, then of the next 8 */
            if constexpr (by_rows)
                opjit_ldmatrix_x4_trans(b[j],
                                        tile->w + (k + lane % 16) * SYNC_W_STRIDE + column + 16 * j + lane / 16 * 8);
            else
                opjit_ldmatrix_x4(b[j], tile->w + (column + 16 * j + lane % 8 + lane / 16 * 8) * SYNC_X_STRIDE + k +
                                            lane / 8 % 2 * 8);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint32_t half[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
                opjit_mma_m16n8k16(d[i][j], a[i], half, element());
            }
    }
}

#endif

template <typename element, bool by_rows>
static __global__ void __launch_bounds__(SYNC_THREADS, 2)
    matmul_sync(const __grid_constant__ matmul_job job, bool packed_x, bool packed_w)
{
#if OPJIT_HAS_MMA
    extern __shared__ __align__(1024) unsigned char memory[];
    sync_tile<element, by_rows> *tiles = (sync_tile<element, by_rows> *)memory;
    const bool is_silu = job.epilogue == MATMUL_SILU_MULTIPLY;
    const int columns = columns_of_tile(job, SYNC_COLUMNS), warp = (int)threadIdx.x / 32;
    const int64_t down = (job.rows + SYNC_ROWS - 1) / SYNC_ROWS; /* tiles with the same columns follow each other */
    const int64_t row = blockIdx.x % down * SYNC_ROWS, column = blockIdx.x / down * columns;
    const int64_t steps = (job.depth + SYNC_DEPTH - 1) / SYNC_DEPTH;
    const int warp_row = warp / 4 * 64, warp_column = warp % 4 * 32;
    float d[4][4][4] = {};
    sync_loads<element, by_rows> loads(job, row, column);
    for (int step = 0; step < SYNC_STAGES - 1; step++)
        loads.step(&tiles[step], packed_x, packed_w);
    int stage = 0, next = SYNC_STAGES - 1;
    for (int64_t step = 0; step < steps; step++) {
        opjit_cp_async_wait_group<SYNC_STAGES - 2>();
        __syncthreads(); /* this step's tile is there, and the tile before it is read */
        loads.step(&tiles[next], packed_x, packed_w);
        multiply_sync(d, &tiles[stage], warp_row, warp_column);
        stage = stage + 1 == SYNC_STAGES ? 0 : stage + 1;
        next = next + 1 == SYNC_STAGES ? 0 : next + 1;
    }

    opjit_cp_async_wait_group<0>();
    __syncthreads(); /* all tiles are read: the sums take their place */

    float *sums = (float *)memory;
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int part = 0; part < 4; part++)
                sums[(warp_row + 16 * i + lane / 4 + part / 2 * 8) * SYNC_SUMS_STRIDE + warp_column + 8 * j +
                     lane % 4 * 2 + part % 2] = d[i][j][part];
    __syncthreads();
    const int fours = is_silu ? 16 : 32, c = (int)threadIdx.x % fours * 4, at = is_silu ? c / 16 * 32 + c % 16 : c;
    const int existing = job.rows - row < SYNC_ROWS ? (int)(job.rows - row) : SYNC_ROWS;
    if (column + c >= job.columns)
        return;
    float bias[4], partner[4];
    load_bias<element>(bias, job, column + c);
    load_bias<element>(partner, job, column + c + job.up);
    for (int r = (int)threadIdx.x / fours; r < existing; r += SYNC_THREADS / fours) {
        const float *sum = sums + r * SYNC_SUMS_STRIDE + at, *other = is_silu ? sum + 16 : sum;
        float z[4], up[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            z[i] = bias[i] + sum[i];
            up[i] = partner[i] + other[i];
        }
        finish_four<element>(job, z, up, row + r, column + c);
    }
#endif
}

#endif
