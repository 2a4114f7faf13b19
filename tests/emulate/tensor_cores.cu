/*
 * tensor_cores.cu - right kernels with the functions of opjit_mma.h (mistake 0), and mistakes, one at a time. A mistake's line is
 * marked with "B<number>". run(mistake, kernel) returns whether the results are right.
 */
#include "harness.h"

#include "opjit_mma.h"

#include <stdarg.h>

/* Functions of opjit's runtime, which the program does not contain. */
extern "C" {
opjit_status opjit_error_new(const char *, int, const char *format, ...)
{
    static char text[1000];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    fprintf(stderr, "%s\n", text);
    return (opjit_status)text;
}

opjit_status opjit_error_at(opjit_status error, const char *, int)
{
    return error;
}

const char *opjit_dtype_name(opjit_dtype)
{
    return "a dtype";
}

size_t opjit_dtype_size(opjit_dtype dtype)
{
    return dtype == OPJIT_FLOAT32 ? 4 : 2;
}
}

static opjit_tensor_map map_of(const void *data, opjit_dtype dtype, int rows, int columns, unsigned box_rows,
                               unsigned box_columns, opjit_swizzle swizzle)
{
    opjit_tensor_map map = {};
    const opjit_tiled tiled = {data, dtype, 2, {rows, columns}, {columns, 1}};
    const uint32_t box[2] = {box_rows, box_columns};
    if (opjit_tensor_map_encode(&map, &tiled, box, swizzle))
        abort();
    return map;
}

static float number(opjit_bfloat16 x)
{
    return opjit_bfloat16_to_float(x);
}

static float number(opjit_half x)
{
    return opjit_half_to_float(x);
}

static float number(opjit_float8_e4m3fn x)
{
    return opjit_float8_e4m3fn_to_float(x);
}

static float number(opjit_float8_e5m2 x)
{
    return opjit_float8_e5m2_to_float(x);
}

static float number(float x)
{
    return x;
}

static int32_t number(int8_t x)
{
    return x;
}

static void set(opjit_bfloat16 *to, int x)
{
    *to = opjit_float_to_bfloat16((float)x);
}

static void set(opjit_half *to, int x)
{
    *to = opjit_float_to_half((float)x);
}

static void set(opjit_float8_e4m3fn *to, int x)
{
    *to = opjit_float_to_float8_e4m3fn((float)x);
}

static void set(opjit_float8_e5m2 *to, int x)
{
    *to = opjit_float_to_float8_e5m2((float)(x / 2));
}

static void set(float *to, int x)
{
    *to = (float)x;
}

static void set(int8_t *to, int x)
{
    *to = (int8_t)x;
}

static opjit_bfloat16 small(int i)
{
    return opjit_float_to_bfloat16((float)(i * 7 % 13 - 6) / 4);
}

// 1: a producer's warp loads by TMA, a warpgroup multiplies by wgmma
enum { DEPTH = 64, STEPS = 5, STAGES = 2, ROWS = 64, COLUMNS = 16 };

struct stages {
    unsigned char a[STAGES][ROWS * DEPTH * 2];
    unsigned char b[STAGES][COLUMNS * DEPTH * 2];
    opjit_mbarrier full[STAGES], empty[STAGES];
};

__device__ static void produce(int bug, stages *s, const opjit_tensor_map *a, const opjit_tensor_map *b)
{
    const unsigned bytes = sizeof s->a[0] + sizeof s->b[0] + (bug == 3 ? 16 : 0) - (bug == 4 ? sizeof s->b[0] : 0);
    for (int step = 0; step < STEPS; step++) {
        const int stage = step % STAGES;
        if (bug != 5)
            opjit_mbarrier_wait(&s->empty[stage], (step / STAGES & 1) ^ 1); // B12
        if (bug == 2)
            opjit_mbarrier_arrive(&s->full[stage]);
        else
            opjit_mbarrier_arrive_expect_tx(&s->full[stage], bytes);
        opjit_tma_load_2d(s->a[stage], a, &s->full[stage], step * DEPTH, 0); // B2 B5 B6 B11
        opjit_tma_load_2d(s->b[stage], b, &s->full[stage], step * DEPTH, 0); // B4
    }
}

__device__ static void consume(int bug, stages *s, float (&d)[COLUMNS / 2])
{
    for (int step = 0; step < STEPS; step++) {
        const int stage = step % STAGES, waited = bug == 13 ? step % STAGES ^ 1 : stage;
        const unsigned parity = bug == 14 ? 0 : (step / STAGES & 1) ^ (bug == 1);
        opjit_mbarrier_wait(&s->full[waited], parity); // B3 B12 B14
        uint64_t a = opjit_wgmma_descriptor(s->a[stage], OPJIT_K_MAJOR);
        uint64_t b = opjit_wgmma_descriptor(s->b[stage], OPJIT_K_MAJOR);
        if (bug != 10)
            opjit_wgmma_fence();
        for (int k = 0; k < DEPTH; k += 16) {
            opjit_wgmma_m64n16k16<opjit_bfloat16>(d, a, b, step > 0 || k > 0); // B1 B4 B5 B6 B9 B10 B13 B14
            a = opjit_wgmma_next(a, OPJIT_K_MAJOR);
            b = opjit_wgmma_next(b, OPJIT_K_MAJOR);
        }
        if (bug != 8)
            opjit_wgmma_commit_group();
        if (bug == 6 && threadIdx.x == 0)
            opjit_mbarrier_arrive(&s->empty[stage]);
        if (bug != 7 || step < STEPS - 1)
            opjit_wgmma_wait_group<0>();
        if (bug != 6 && threadIdx.x == 0)
            opjit_mbarrier_arrive(&s->empty[stage]);
    }
}

__global__ void pipeline(int bug, const __grid_constant__ opjit_tensor_map a,
                         const __grid_constant__ opjit_tensor_map b, float *out)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    stages *s = (stages *)memory;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            opjit_mbarrier_init(&s->full[i], 1); // B12
            opjit_mbarrier_init(&s->empty[i], 1);
        }
        if (bug != 11)
            opjit_fence_mbarrier_init();
    }
    if (bug != 12)
        __syncthreads();
    if (threadIdx.x == 128)
        produce(bug, s, &a, &b);
    if (threadIdx.x >= 128)
        return;
    float d[COLUMNS / 2];
    consume(bug, s, d);
    const int row = (int)threadIdx.x / 32 * 16 + (int)threadIdx.x % 32 / 4, column = (int)threadIdx.x % 4 * 2;
    for (int i = 0; i < COLUMNS / 2; i++)
        out[(row + i / 2 % 2 * 8) * COLUMNS + i / 4 * 8 + column + i % 2] = d[i]; // B7 B8
}

static bool run_pipeline(int bug)
{
    const int k = STEPS * DEPTH - 24; /* the last tile ends outside */
    device<opjit_bfloat16> a("a", ROWS * k), b("b", COLUMNS * k);
    device<float> out("out", ROWS * COLUMNS, true);
    for (int i = 0; i < ROWS * k; i++)
        a[i] = small(i);
    for (int i = 0; i < COLUMNS * k; i++)
        b[i] = small(3 * i + 1);
    const opjit_swizzle swizzle = bug == 9 ? OPJIT_NO_SWIZZLE : OPJIT_SWIZZLE_128;
    const opjit_tensor_map of_a = map_of(a, OPJIT_BFLOAT16, ROWS, k, ROWS, DEPTH, OPJIT_SWIZZLE_128);
    const opjit_tensor_map of_b = map_of(b, OPJIT_BFLOAT16, COLUMNS, k, COLUMNS, DEPTH, swizzle);
    pipeline<<<1, 160, sizeof(stages)>>>(bug, of_a, of_b, out);
    bool ok = true;
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) {
            float sum = 0;
            for (int i = 0; i < k; i++)
                sum += number(a[r * k + i]) * number(b[c * k + i]);
            ok &= is_near(out[r * COLUMNS + c], sum);
        }
    return ok;
}

// 2: tiles are loaded by TMA, doubled by all threads, and stored by TMA
enum { TILE = 32, TILES = 3 };

__global__ void doubled(int bug, const __grid_constant__ opjit_tensor_map from,
                        const __grid_constant__ opjit_tensor_map to)
{
    __shared__ __align__(1024) float tile[TILE * TILE];
    __shared__ opjit_mbarrier full, read;
    const int t = threadIdx.x;
    if (t == 0) {
        opjit_mbarrier_init(&full, 1);
        opjit_mbarrier_init(&read, bug == 24 ? 64 : 128);
        opjit_fence_mbarrier_init();
    }
    __syncthreads();
    for (int i = 0; i < TILES; i++) {
        if (t == 0) {
            if (bug != 22)
                opjit_tma_wait_group_read<0>();
            opjit_mbarrier_arrive_expect_tx(&full, sizeof tile);
            opjit_tma_load_2d(tile, &from, &full, i * TILE, 0); // B22 B25
        }
        opjit_mbarrier_wait(&full, i & 1);
        float two[TILE * TILE / 128];
        for (int j = 0; j < TILE * TILE / 128; j++)
            two[j] = 2 * tile[t + j * 128]; // B24
        opjit_mbarrier_arrive(&read);
        opjit_mbarrier_wait(&read, i & 1); // B24
        for (int j = 0; j < TILE * TILE / 128; j++)
            tile[t + j * 128] = two[j]; // B20 B21 B24
        if (bug != 20)
            opjit_fence_proxy_async();
        if (bug != 21)
            opjit_named_barrier(1, 128);
        if (t == 0) {
            opjit_tma_store_2d(&to, tile, i * TILE, 0); // B20 B21 B22 B23 B25
            if (bug != 25)
                opjit_tma_commit_group();
        }
    }
    if (t == 0 && bug != 23)
        opjit_tma_wait_group_read<0>();
}

static bool run_doubled(int bug)
{
    const int rows = 20, columns = TILE * TILES - 12;
    device<float> x("x", rows * columns), out("out", rows * columns, true);
    for (int i = 0; i < rows * columns; i++)
        x[i] = i;
    const opjit_tensor_map from = map_of(x, OPJIT_FLOAT32, rows, columns, TILE, TILE, OPJIT_SWIZZLE_128);
    const opjit_tensor_map to = map_of(out, OPJIT_FLOAT32, rows, columns, TILE, TILE, OPJIT_SWIZZLE_128);
    doubled<<<1, 128>>>(bug, from, to);
    bool ok = true;
    for (int i = 0; i < rows * columns; i++)
        ok &= out[i] == 2 * x[i];
    return ok;
}

// 3: cp.async, ldmatrix and mma.sync, two tiles of 16 x 16 and 16 x 8 in turns
enum { LINE = 24 }; /* elements of a row, so that eight rows lie in all banks */

__device__ static void copy_tiles(int bug, opjit_bfloat16 (*tile)[LINE], const opjit_bfloat16 *a,
                                  const opjit_bfloat16 *b, int k, int step)
{
    const int t = threadIdx.x, row = t / 2, piece = t % 2 * 8;
    const opjit_bfloat16 *from = row < 16 ? a + row * k : b + (row - 16) * k;
    if (t < 48)
        opjit_cp_async(&tile[row][piece], from + step * 16 + piece, 16); // B30 B31 B32 B33
    if (bug != 32)
        opjit_cp_async_commit_group();
}

__global__ void product(int bug, const opjit_bfloat16 *a, const opjit_bfloat16 *b, float *out, int k)
{
    __shared__ __align__(16) opjit_bfloat16 tiles[2][24][LINE];
    const int t = threadIdx.x, lane = t % 32, steps = k / 16;
    float d[4] = {};
    copy_tiles(bug, tiles[0], a, b, k, 0);
    for (int step = 0; step < steps; step++) {
        opjit_bfloat16(*tile)[LINE] = tiles[step % 2];
        if (bug == 30)
            opjit_cp_async_wait_group<1>();
        else
            opjit_cp_async_wait_group<0>();
        if (bug != 31)
            __syncthreads();
        if (step + 1 < steps)
            copy_tiles(bug, tiles[bug == 33 ? step % 2 : (step + 1) % 2], a, b, k, step + 1);
        if (t >= 32 || (bug == 35 && lane == 7))
            continue;
        uint32_t of_a[4], of_b[4];
        opjit_ldmatrix_x4(of_a, &tile[lane % 16][lane / 16 * 8 + (bug == 34 ? 4 : 0)]); // B30 B31 B32 B33 B34 B35
        opjit_ldmatrix_x4(of_b, &tile[16 + lane % 8][lane / 8 % 2 * 8]);
        const uint32_t half[2] = {of_b[0], of_b[1]};
        opjit_mma_m16n8k16(d, of_a, half, opjit_bfloat16());
    }
    if (t < 32)
        for (int i = 0; i < 4; i++)
            out[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}

static bool run_product(int bug)
{
    const int k = 64;
    device<opjit_bfloat16> a("a", 16 * k), b("b", 8 * k);
    device<float> out("out", 16 * 8, true);
    for (int i = 0; i < 16 * k; i++)
        a[i] = small(i);
    for (int i = 0; i < 8 * k; i++)
        b[i] = small(5 * i + 2);
    product<<<1, 64>>>(bug, a, b, out, k);
    bool ok = true;
    for (int r = 0; r < 16; r++)
        for (int c = 0; c < 8; c++) {
            float sum = 0;
            for (int i = 0; i < k; i++)
                sum += number(a[r * k + i]) * number(b[c * k + i]);
            ok &= is_near(out[r * 8 + c], sum);
        }
    return ok;
}

// 4: blocks of a cluster add each other's numbers
__global__ void cluster_sum(int bug, const float *x, float *out)
{
    __shared__ __align__(16) float own[128];
    const unsigned rank = opjit_cluster_rank(), blocks = 4;
    own[threadIdx.x] = x[blockIdx.x * 128 + threadIdx.x]; // B40
    if (bug == 43)
        __syncthreads();
    else if (bug != 40)
        opjit_cluster_sync();
    float sum = 0;
    if (threadIdx.x < 32)
        for (unsigned i = 0; i < blocks; i++) {
            const unsigned from = bug == 42 ? i + 1 : (rank + i) % blocks;
            const float4 part = opjit_cluster_load((const float4 *)own + threadIdx.x, from); // B40 B41 B42 B43
            sum += part.x + part.y + part.z + part.w;
        }
    if (bug != 41)
        opjit_cluster_sync();
    if (threadIdx.x < 32)
        out[blockIdx.x * 32 + threadIdx.x] = sum;
}

static bool run_cluster_sum(int bug)
{
    const int blocks = 8;
    device<float> x("x", blocks * 128), out("out", blocks * 32, true);
    for (int i = 0; i < blocks * 128; i++)
        x[i] = i;
    if (opjit_launch_cluster(cluster_sum, dim3(blocks), dim3(128), 4, 0, (cudaStream_t)0, bug, (const float *)x,
                             (float *)out))
        return false;
    bool ok = true;
    for (int i = 0; i < blocks * 32; i++) {
        float sum = 0;
        for (int j = 0; j < 16; j++)
            sum += x[i / 128 * 512 + j / 4 * 128 + i % 32 * 4 + j % 4];
        ok &= out[i] == sum;
    }
    return ok;
}

// 5: the first block of a pair loads tiles for both, which arrive at its mbarrier when they have read
__global__ void pair_copy(int bug, const __grid_constant__ opjit_tensor_map from, float *out)
{
    __shared__ __align__(1024) float tile[256];
    __shared__ opjit_mbarrier full, empty;
    const unsigned rank = opjit_cluster_rank(), t = threadIdx.x;
    if (t == 0) {
        opjit_mbarrier_init(&full, 1);                  // B50
        opjit_mbarrier_init(&empty, bug == 51 ? 1 : 2); // B50
        opjit_fence_mbarrier_init();
    }
    if (bug == 50)
        __syncthreads();
    else
        opjit_cluster_sync();
    for (int i = 0; i < 4; i++) {
        if (t == 0) {
            opjit_mbarrier_arrive_expect_tx(&full, sizeof tile);
            if (rank == 0) {
                opjit_mbarrier_wait(&empty, (i & 1) ^ 1);                                    // B51 B53
                opjit_tma_load_1d_multicast(tile, &from, &full, i * 256, bug == 52 ? 1 : 3); // B50 B51
            }
        }
        opjit_mbarrier_wait(&full, i & 1);       // B51 B52
        out[(i * 2 + rank) * 256 + t] = tile[t]; // B51
        __syncthreads();
        if (t == 0 && (bug != 53 || rank == 0))
            opjit_mbarrier_arrive_cluster(&empty, 0); // B54
    }
    if (bug != 54)
        opjit_cluster_sync();
}

static bool run_pair_copy(int bug)
{
    device<float> x("x", 1024), out("out", 2048, true);
    for (int i = 0; i < 1024; i++)
        x[i] = i;
    opjit_tensor_map map = {};
    const opjit_tiled tiled = {x, OPJIT_FLOAT32, 1, {1024}, {1}};
    const uint32_t box[1] = {256};
    if (opjit_tensor_map_encode(&map, &tiled, box, OPJIT_NO_SWIZZLE))
        return false;
    if (opjit_launch_cluster(pair_copy, dim3(2), dim3(256), 2, 0, (cudaStream_t)0, bug, map, (float *)out))
        return false;
    bool ok = true;
    for (int i = 0; i < 2048; i++)
        ok &= out[i] == x[i / 512 * 256 + i % 256];
    return ok;
}

// 6: two warps hand over to two others through a barrier with a number
__global__ void handed_over(int bug, const float *x, float *out)
{
    __shared__ float s[64];
    const int t = threadIdx.x;
    if (t < 64) {
        s[t] = x[t]; // B61
        if (bug != 61)
            opjit_named_barrier(3, 128);
    } else {
        opjit_named_barrier(3, bug == 60 ? 96 : bug == 61 ? 64 : 128); // B60
        out[t - 64] = s[127 - t];                                      // B61
    }
}

static bool run_handed_over(int bug)
{
    device<float> x("x", 64), out("out", 64, true);
    for (int i = 0; i < 64; i++)
        x[i] = i;
    handed_over<<<1, 128>>>(bug, x, out);
    bool ok = true;
    for (int i = 0; i < 64; i++)
        ok &= out[i] == x[63 - i];
    return ok;
}

// 7: wgmma of operands that threads write, in all orders: the sums of one block
template <opjit_major a_major, opjit_major b_major, typename element>
__global__ void written(int bug, const element *a, const element *b, float *out)
{
    __shared__ __align__(1024) unsigned char of_a[64 * 64 * 2], of_b[64 * 64 * 2];
    const int t = threadIdx.x;
    for (int i = t; i < 64 * 64; i += 128) {
        const int line = i / 64, k = i % 64; /* a is 64 x 64, and so is the transpose of b */
        const unsigned row_a = a_major == OPJIT_K_MAJOR ? line : k, at_a = a_major == OPJIT_K_MAJOR ? k : line;
        const unsigned row_b = b_major == OPJIT_K_MAJOR ? line : k, at_b = b_major == OPJIT_K_MAJOR ? k : line;
        *(element *)(of_a + opjit_swizzled_128(row_a, at_a / 8) + at_a % 8 * 2) = a[i]; // B70
        *(element *)(of_b + opjit_swizzled_128(row_b, at_b / 8) + at_b % 8 * 2) = b[i];
    }
    if (bug != 70)
        opjit_fence_proxy_async();
    if (bug != 71)
        __syncthreads();
    float d[32] = {};
    uint64_t da = opjit_wgmma_descriptor(of_a, a_major), db = opjit_wgmma_descriptor(of_b, b_major);
    opjit_wgmma_fence();
    for (int k = 0; k < 64; k += 16) {
        opjit_wgmma_m64n64k16<element, a_major, b_major>(d, da, db, true); // B70 B71 B73
        da = opjit_wgmma_next(da, a_major);
        db = opjit_wgmma_next(db, b_major);
    }
    opjit_wgmma_commit_group();
    if (bug == 73)
        of_a[t] = 0; // B73
    if (bug == 72)
        d[0] += 1; // B72
    opjit_wgmma_wait_group<0>();
    const int row = t / 32 * 16 + t % 32 / 4, column = t % 4 * 2;
    for (int i = 0; i < 32; i++)
        out[(row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + column + i % 2] = d[i];
}

template <opjit_major a_major, opjit_major b_major, typename element>
static bool run_written(int bug)
{
    device<element> a("a", 64 * 64), b("b", 64 * 64);
    device<float> out("out", 64 * 64, true);
    for (int i = 0; i < 64 * 64; i++) {
        set(&a[i], i * 7 % 13 - 6);
        set(&b[i], i * 5 % 11 - 4);
    }
    written<a_major, b_major, element><<<1, 128>>>(bug, a, b, out);
    bool ok = true;
    for (int r = 0; r < 64; r++)
        for (int c = 0; c < 64; c++) {
            float sum = 0;
            for (int k = 0; k < 64; k++)
                sum += number(a[r * 64 + k]) * number(b[c * 64 + k]);
            ok &= is_near(out[r * 64 + c], sum);
        }
    return ok;
}

static bool run_all_written(int bug)
{
    return run_written<OPJIT_K_MAJOR, OPJIT_K_MAJOR, opjit_bfloat16>(bug) &&
           run_written<OPJIT_K_MAJOR, OPJIT_MN_MAJOR, opjit_half>(bug) &&
           run_written<OPJIT_MN_MAJOR, OPJIT_K_MAJOR, opjit_bfloat16>(bug) &&
           run_written<OPJIT_MN_MAJOR, OPJIT_MN_MAJOR, opjit_half>(bug);
}

// 8: mma.sync of other types, and stmatrix against ldmatrix with a transpose
template <typename element, typename sum>
__device__ static void multiply(const uint8_t *a, const uint8_t *b, sum *out)
{
    const int lane = threadIdx.x % 32, bytes = lane % 4 * 4;
    uint32_t of_a[4], of_b[2]; /* a row has 32 bytes */
    sum d[4] = {};
    for (int i = 0; i < 4; i++)
        of_a[i] = *(const uint32_t *)(a + (lane / 4 + i % 2 * 8) * 32 + i / 2 * 16 + bytes);
    for (int i = 0; i < 2; i++)
        of_b[i] = *(const uint32_t *)(b + lane / 4 * 32 + i * 16 + bytes);
    if constexpr (sizeof(element) == 1)
        opjit_mma_m16n8k32(d, of_a, of_b, element());
    else if constexpr (sizeof(element) == 2)
        opjit_mma_m16n8k16(d, of_a, of_b, element());
    else
        opjit_mma_m16n8k8(d, of_a, of_b, element());
    for (int i = 0; i < 4; i++)
        out[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}

template <typename element, typename sum>
__global__ void multiplied(const uint8_t *a, const uint8_t *b, sum *out)
{
    multiply<element, sum>(a, b, out);
}

template <typename element, typename sum>
static bool run_multiplied()
{
    const int k = 32 / (int)sizeof(element);
    device<element> a("a", 16 * k), b("b", 8 * k);
    device<sum> out("out", 128, true);
    for (int i = 0; i < 16 * k; i++)
        set(&a[i], i * 7 % 13 - 6);
    for (int i = 0; i < 8 * k; i++)
        set(&b[i], i * 5 % 11 - 4);
    multiplied<element, sum><<<1, 32>>>((const uint8_t *)a.data, (const uint8_t *)b.data, out.data);
    bool ok = true;
    for (int r = 0; r < 16; r++)
        for (int c = 0; c < 8; c++) {
            sum all = 0;
            for (int i = 0; i < k; i++)
                all += number(a[r * k + i]) * number(b[c * k + i]);
            ok &= out[r * 8 + c] == all;
        }
    return ok;
}

__global__ void transposed(const uint16_t *x, uint16_t *out)
{
    __shared__ __align__(16) uint16_t tile[32][8];
    const int lane = threadIdx.x;
    uint32_t r[4];
    for (int i = 0; i < 4; i++) /* matrix i is rows 8 i to 8 i + 7 of x */
        r[i] = *(const uint32_t *)(x + (8 * i + lane / 4) * 8 + lane % 4 * 2);
    opjit_stmatrix_x4(tile[lane], r);
    __syncwarp();
    opjit_ldmatrix_x4_trans(r, tile[lane]);
    for (int i = 0; i < 4; i++)
        *(uint32_t *)(out + (8 * i + lane / 4) * 8 + lane % 4 * 2) = r[i];
}

static bool run_types(int)
{
    bool ok = run_multiplied<int8_t, int32_t>() && run_multiplied<float, float>() &&
              run_multiplied<opjit_half, float>() && run_multiplied<opjit_float8_e4m3fn, float>() &&
              run_multiplied<opjit_float8_e5m2, float>();
    device<uint16_t> x("x", 256), out("out", 256, true);
    for (int i = 0; i < 256; i++)
        x[i] = (uint16_t)i;
    transposed<<<1, 32>>>(x.data, out.data);
    for (int i = 0; i < 256; i++)
        ok &= out[i] == x[i / 64 * 64 + i % 8 * 8 + i / 8 % 8];
    return ok;
}

// 9: tiles of three dimensions, partly outside, with each swizzle
__global__ void tile_of(int bug, const __grid_constant__ opjit_tensor_map map, int bytes, float *out)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ opjit_mbarrier full;
    if (threadIdx.x == 0) {
        if (bug != 90)
            opjit_mbarrier_init(&full, 1);
        opjit_fence_mbarrier_init();
        opjit_mbarrier_arrive_expect_tx(&full, bytes);                           // B90
        opjit_tma_load_3d(memory + (bug == 91 ? 64 : 0), &map, &full, -2, 1, 3); // B91 B92
    }
    __syncthreads();
    if (threadIdx.x == 0)                              /* for its warp */
        opjit_mbarrier_wait(&full, bug == 92 ? 1 : 0); // B92
    if (bug != 93)
        __syncwarp();
    for (int i = threadIdx.x; i < bytes / 4; i += 32)
        out[i] = ((const float *)memory)[i]; // B92 B93
}

static bool run_tiles(int bug)
{
    const int sizes[3] = {5, 6, 20};
    device<float> x("x", 600);
    for (int i = 0; i < 600; i++)
        x[i] = i + 1;
    bool ok = true;
    for (int swizzle = 0; swizzle < 4; swizzle++) {
        const int wide = 4 << swizzle, count = 3 * 8 * wide;
        const opjit_tiled tiled = {x, OPJIT_FLOAT32, 3, {5, 6, 20}, {120, 20, 1}};
        const uint32_t box[3] = {3, 8, (uint32_t)wide};
        opjit_tensor_map map = {};
        device<float> out("out", count, true);
        if (opjit_tensor_map_encode(&map, &tiled, box, (opjit_swizzle)swizzle))
            return false;
        tile_of<<<1, 32, count * 4>>>(bug, map, count * 4, out);
        for (int i = 0; i < count; i++) {
            const int z = 3 + i / wide / 8, y = 1 + i / wide % 8, c = -2 + i % wide;
            const bool inside = z < sizes[0] && y < sizes[1] && c >= 0 && c < sizes[2];
            const int byte = i * 4, pieces = (1 << swizzle) - 1, at = byte ^ (byte >> 7 & pieces) << 4;
            ok &= out[at / 4] == (inside ? x[z * 120 + y * 20 + c] : 0);
        }
    }
    return ok;
}

// 10: more than 48 KiB of shared memory are allowed for one kernel, not for all
enum { LARGE = 60 << 10 };

template <int which>
__global__ void large(float *out)
{
    extern __shared__ float memory[];
    memory[LARGE / 4 - 1] = which;
    out[which] = memory[LARGE / 4 - 1];
}

static bool run_large(int bug)
{
    device<float> out("out", 3, true);
    cudaFuncSetAttribute(large<0>, cudaFuncAttributeMaxDynamicSharedMemorySize, LARGE);
    cudaFuncSetAttribute(large<1>, cudaFuncAttributeMaxDynamicSharedMemorySize, LARGE / 2);
    large<0><<<1, 1, LARGE>>>(out);
    if (bug == 100)
        large<2><<<1, 1, LARGE>>>(out); // B100
    return out[0] == 0;
}

extern "C" __attribute__((visibility("default"))) bool run(int bug, int kernel)
{
    static bool (*const kernels[])(int) = {run_pipeline,  run_doubled,     run_product,     run_cluster_sum,
                                           run_pair_copy, run_handed_over, run_all_written, run_types,
                                           run_tiles,     run_large};
    cudaGetLastError();
    return kernels[kernel - 1](bug) && cudaGetLastError() == cudaSuccess;
}
