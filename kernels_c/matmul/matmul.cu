/*
 * matmul on CUDA: out = activation(x w + bias) + residual with tensor cores; matmul.h has the formulas.
 *
 * Three kernels, chosen by the GPU, the sizes and the strides: matmul_wide.h for many rows on Hopper, matmul_narrow.h for
 * few rows there, and matmul_sync.h for other GPUs, from sm_80 on, and for what TMA cannot read. This file chooses.
 *
 * All sums are float and have a fixed order: the same bits in each run. For silu_multiply, a tile has columns of both
 * halves of w, so a thread has both factors.
 */
#include "matmul_narrow.h"
#include "matmul_sync.h"
#include "matmul_wide.h"

/* Times for the choice of a kernel, measured on an H200: of a step of a block, and beside the steps, in steps. */
#define NARROW_STEP 6
#define WIDE_STEP 8
#define OTHER_STEPS 8

/* What the launchers know of a call and its GPU. */
typedef struct matmul_plan {
    matmul_job job;
    opjit_tiled x, w; /* for TMA; w as (N, K), or as (K, N) if by_rows */
    bool by_rows;     /* the elements of a row of w are adjacent */
    int multiprocessors;
    cudaStream_t stream;
} matmul_plan;

static int64_t parts(int64_t whole, int64_t part)
{
    return (whole + part - 1) / part;
}

/* Can TMA and cp.async read rows of this matrix? */
static bool is_packed(const void *data, int64_t row_stride, int64_t step, int64_t rows)
{
    return step == 1 && (uintptr_t)data % 16 == 0 && (rows == 1 || (row_stride % 8 == 0 && row_stride > 0));
}

/* Can TMA read a matrix with rows of some length? */
static bool is_tiled(const void *data, int64_t row_stride, int64_t step, int64_t length)
{
    return is_packed(data, row_stride, step, 2) && row_stride >= length;
}

/* Can rows of this tensor be read four elements at a time? */
static bool is_fours(const opjit_tensor *t)
{
    return !t ||
           ((uintptr_t)t->data % 8 == 0 && t->strides[t->dim - 1] == 1 && (t->dim == 1 || t->strides[0] % 4 == 0));
}

/* Pairs of wide tiles. */
static int64_t wide_pairs(const matmul_job *job)
{
    return parts(job->rows, 2 * WIDE_ROWS) * parts(job->columns, columns_of_tile(*job, WIDE_COLUMNS));
}

template <typename element, bool by_rows>
static opjit_status launch_wide(const matmul_plan *plan)
{
    const matmul_job *job = &plan->job;
    const uint32_t x_box[2] = {WIDE_ROWS, DEPTH}, out_box[2] = {64, CHUNK};
    const uint32_t w_box[2] = {by_rows ? DEPTH : WIDE_COLUMNS / 2, 64};
    const opjit_tiled to = {job->out, plan->x.dtype, 2, {job->rows, job->columns}, {job->columns, 1}};
    opjit_tensor_map x, w, out;
    OPJIT_TRY(opjit_tensor_map_encode(&x, &plan->x, x_box, OPJIT_SWIZZLE_128));
    OPJIT_TRY(opjit_tensor_map_encode(&w, &plan->w, w_box, OPJIT_SWIZZLE_128));
    OPJIT_TRY(opjit_tensor_map_encode(&out, &to, out_box, OPJIT_SWIZZLE_128));

    const int64_t tiles = wide_pairs(job), at_once = parts(plan->multiprocessors, 2);
    const int64_t pairs = tiles < at_once ? tiles : at_once;
    auto *kernel = matmul_wide<element, by_rows>;
    OPJIT_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(wide_shared)));
    return opjit_launch_cluster(kernel, dim3((unsigned)(2 * pairs)), dim3(WIDE_THREADS), 2, sizeof(wide_shared),
                                plan->stream, x, w, out, *job);
}

/* A way to run narrow tiles: blocks that share the depth, and the time in steps of a block. */
typedef struct narrow_way {
    int splits;
    int64_t time;
} narrow_way;

template <int rows>
static size_t narrow_bytes(void)
{
    const size_t sums = sizeof(float) * rows * NARROW_STRIDE, tiles = sizeof(narrow_shared<rows>);
    return sums > tiles ? sums : tiles;
}

/* Let the kernel have its shared memory, on the current device. */
template <typename element, int rows, bool by_rows>
static opjit_status allow_narrow(void)
{
    OPJIT_CUDA_CHECK(cudaFuncSetAttribute(matmul_narrow<element, rows, by_rows>,
                                          cudaFuncAttributeMaxDynamicSharedMemorySize, (int)narrow_bytes<rows>()));
    return OPJIT_OK;
}

/* How many clusters are resident at once? CUDA is asked once in a process. */
template <typename element, int rows, bool by_rows>
static opjit_status narrow_clusters(int splits, int *count)
{
    static int known[NARROW_CLUSTER + 1];
    if (!known[splits]) {
        int resident;
        OPJIT_TRY((allow_narrow<element, rows, by_rows>()));
        OPJIT_TRY(opjit_resident_clusters(matmul_narrow<element, rows, by_rows>, NARROW_THREADS, (unsigned)splits,
                                          narrow_bytes<rows>(), &resident));
        known[splits] = resident + 1;
    }
    *count = known[splits] - 1;
    return OPJIT_OK;
}

/* The splits that take the least time: the steps of all waves, and the rest of a block. */
template <typename element, int rows, bool by_rows>
static opjit_status narrow_best(const matmul_plan *plan, narrow_way *best)
{
    const matmul_job *job = &plan->job;
    const int64_t columns = columns_of_tile(*job, NARROW_COLUMNS);
    const int64_t tiles = parts(job->columns, columns) * parts(job->rows, rows);
    best->splits = 1;
    best->time = INT64_MAX;
    for (int splits = 1; splits <= NARROW_CLUSTER; splits *= 2) {
        int clusters;
        if (splits > 1 && splits * 4 * DEPTH > job->depth)
            break;
        OPJIT_TRY((narrow_clusters<element, rows, by_rows>(splits, &clusters)));
        if (clusters == 0) /* a part of a GPU */
            break;
        const int64_t time = parts(tiles, clusters) * (parts(job->depth, DEPTH * splits) + OTHER_STEPS + splits);
        if (time < best->time) {
            best->splits = splits;
            best->time = time;
        }
    }
    return OPJIT_OK;
}

template <typename element, int rows, bool by_rows>
static opjit_status launch_narrow(const matmul_plan *plan, int splits)
{
    const matmul_job *job = &plan->job;
    const int64_t columns = columns_of_tile(*job, NARROW_COLUMNS);
    const uint32_t x_box[2] = {rows, DEPTH}, w_box[2] = {64, DEPTH};
    opjit_tensor_map x, w;
    OPJIT_TRY(opjit_tensor_map_encode(&x, &plan->x, x_box, OPJIT_SWIZZLE_128));
    OPJIT_TRY(opjit_tensor_map_encode(&w, &plan->w, w_box, OPJIT_SWIZZLE_128));
    OPJIT_TRY((allow_narrow<element, rows, by_rows>()));
    const dim3 grid((unsigned)splits, (unsigned)parts(job->columns, columns), (unsigned)parts(job->rows, rows));
    return opjit_launch_cluster(matmul_narrow<element, rows, by_rows>, grid, dim3(NARROW_THREADS), (unsigned)splits,
                                narrow_bytes<rows>(), plan->stream, x, w, *job);
}

template <typename element, int rows, bool by_rows>
static opjit_status launch_few(const matmul_plan *plan)
{
    narrow_way way;
    OPJIT_TRY((narrow_best<element, rows, by_rows>(plan, &way)));
    return launch_narrow<element, rows, by_rows>(plan, way.splits);
}

template <typename element, bool by_rows>
static opjit_status launch_sync(const matmul_plan *plan)
{
    const matmul_job *job = &plan->job;
    const int64_t tiles = parts(job->rows, SYNC_ROWS) * parts(job->columns, columns_of_tile(*job, SYNC_COLUMNS));
    OPJIT_CHECK(tiles <= INT32_MAX, "matmul: this product is too large for one launch; split it");
    const size_t bytes = SYNC_STAGES * sizeof(sync_tile<element, by_rows>);
    const bool packed_x = is_packed(job->x, job->x_row, job->x_depth, job->rows);
    const bool packed_w = by_rows ? is_packed(job->w, job->w_depth, job->w_column, job->depth) && job->up % 8 == 0
                                  : is_packed(job->w, job->w_column, job->w_depth, job->columns + job->up);
    static_assert(SYNC_STAGES * sizeof(sync_tile<element, by_rows>) >= sizeof(float) * SYNC_ROWS * SYNC_SUMS_STRIDE,
                  "the sums fit");
    auto *kernel = matmul_sync<element, by_rows>;
    OPJIT_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    kernel<<<(unsigned)tiles, SYNC_THREADS, bytes, plan->stream>>>(*job, packed_x, packed_w);
    return OPJIT_LAUNCHED();
}

template <typename element, bool by_rows>
static opjit_status launch_hopper(const matmul_plan *plan)
{
    const matmul_job *job = &plan->job;
    if (job->rows <= 16)
        return launch_few<element, 16, by_rows>(plan);
    if (job->rows <= 64)
        return launch_few<element, 64, by_rows>(plan);

    narrow_way narrow;
    OPJIT_TRY((narrow_best<element, 128, by_rows>(plan, &narrow)));
    const int64_t waves = parts(wide_pairs(job), parts(plan->multiprocessors, 2));
    const int64_t wide = waves * (parts(job->depth, DEPTH) + OTHER_STEPS) * WIDE_STEP;
    if (job->columns % 8 != 0 || !job->is_packed || narrow.time * NARROW_STEP < wide)
        return launch_narrow<element, 128, by_rows>(plan, narrow.splits);
    return launch_wide<element, by_rows>(plan);
}

/* Fill the plan. */
static opjit_status make_plan(matmul_plan *plan, const matmul_call *c, cudaStream_t stream)
{
    matmul_job *job = &plan->job;
    const opjit_tensor *x = c->x, *w = c->w;
    const int64_t columns = w->sizes[1];
    plan->stream = stream;
    plan->by_rows = w->strides[1] == 1 && w->strides[0] != 1;
    job->rows = c->rows;
    job->columns = c->columns;
    job->depth = c->depth;
    job->x = x->data;
    job->w = w->data;
    job->x_row = x->strides[0];
    job->x_depth = x->strides[1];
    job->w_depth = w->strides[0];
    job->w_column = w->strides[1];
    job->out = c->out->data;
    job->epilogue = c->epilogue;
    job->up = columns - c->columns;
    job->bias = c->bias ? c->bias->data : NULL;
    job->bias_step = c->bias ? c->bias->strides[0] : 0;
    job->residual = c->residual ? c->residual->data : NULL;
    job->residual_row = c->residual ? c->residual->strides[0] : 0;
    job->residual_column = c->residual ? c->residual->strides[1] : 0;
    job->is_packed = c->columns % 4 == 0 && is_fours(c->bias) && is_fours(c->residual);
    const opjit_tiled x_tiled = {x->data, x->dtype, 2, {c->rows, c->depth}, {job->x_row, 1}};
    const opjit_tiled w_rows = {w->data, w->dtype, 2, {c->depth, columns}, {job->w_depth, 1}};
    const opjit_tiled w_columns = {w->data, w->dtype, 2, {columns, c->depth}, {job->w_column, 1}};
    plan->x = x_tiled;
    plan->w = plan->by_rows ? w_rows : w_columns;
    return opjit_multiprocessors(&plan->multiprocessors);
}

/* Does the GPU have wgmma, and can TMA read x and w? */
static opjit_status takes_hopper(const matmul_plan *plan, bool *takes)
{
    const matmul_job *job = &plan->job;
    int device, major;
    OPJIT_CUDA_CHECK(cudaGetDevice(&device));
    OPJIT_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    OPJIT_CHECK(major >= 8, "matmul needs a GPU of compute capability 8.0 or later; use x @ w on this one");
    const int64_t columns = job->columns + job->up, most_tiles = 65535; /* of a grid in y and z */
    const bool fits = job->depth > 0 && job->depth <= INT32_MAX && parts(job->rows, 128) <= most_tiles &&
                      parts(columns, NARROW_COLUMNS / 2) <= most_tiles;
    const bool reads_x = is_tiled(job->x, job->x_row, job->x_depth, job->depth);
    const bool reads_w = plan->by_rows ? is_tiled(job->w, job->w_depth, job->w_column, columns) && job->up % 8 == 0
                                       : is_tiled(job->w, job->w_column, job->w_depth, job->depth);
    *takes = major == 9 && fits && reads_x && reads_w;
    return OPJIT_OK;
}

template <typename element>
static opjit_status run(const matmul_plan *plan)
{
    bool hopper;
    OPJIT_TRY(takes_hopper(plan, &hopper));
    if (hopper)
        return plan->by_rows ? launch_hopper<element, true>(plan) : launch_hopper<element, false>(plan);
    return plan->by_rows ? launch_sync<element, true>(plan) : launch_sync<element, false>(plan);
}

opjit_status matmul_cuda(const opjit_tensor *x, const opjit_tensor *w, const opjit_tensor *bias,
                         const opjit_tensor *residual, const char *epilogue, opjit_tensor *out, cudaStream_t stream)
{
    matmul_call call = {x, w, bias, residual, out, 0, 0, 0, MATMUL_NONE};
    matmul_plan plan;
    OPJIT_TRY(matmul_start(&call, epilogue));
    if (out->numel == 0)
        return OPJIT_OK;
    OPJIT_TRY(make_plan(&plan, &call, stream));
    return x->dtype == OPJIT_FLOAT16 ? run<opjit_half>(&plan) : run<opjit_bfloat16>(&plan);
}
