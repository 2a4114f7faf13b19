/*
 * allreduce for CUDA: the sum of all elements, with torch.sum's dtype rules.
 *
 * A block sums its share of the tensor with 16-byte loads, several in flight in every thread. How the blocks' sums come
 * together depends on the size:
 *   one block      small tensors: its sum is the result
 *   one cluster    up to 3 MiB, sm_90 and later: eight blocks hand their sums to the first through its shared memory
 *   a full grid    the blocks' sums go to scratch memory, and when all are there the first block adds them. All blocks
 *                  have to be resident for one to wait for the others, which a cooperative launch guarantees; it takes the
 *                  host 0.4 us longer than another, a second launch 2.5 us.
 * Each is one launch. What a stride of 0 repeats is added once and multiplied. Sums are added in a fixed order, nothing is kept between calls, and no memory needs to be zeroed: the
 * op gives the same bits each time, on any stream and under CUDA graphs.
 *
 * Accuracy: a thread adds at most 128 bytes of float16, bfloat16 or float32 in float, as a tree where it can; all else is
 * added in double. float64 is summed in double; integers and bool are summed modulo 2^64.
 *
 * Layout of the file: readers (what 16 bytes of a dtype add up to), kernels, launcher.
 */
#include "opjit_cuda.h"

#include "allreduce.h"

#define THREADS 512
#define IN_FLIGHT 8      /* 16-byte loads of a thread before it adds */
#define ELEMENTS 4       /* likewise, where it loads element by element */
#define BLOCKS_PER_SM 2  /* resident at once */
#define CLUSTER 8        /* blocks in a cluster: the most that every device with clusters takes */
/* Up to how many loads one block, and one cluster, take no longer than what comes after them (measured on an H200). */
#define ONE_BLOCK_LOADS (4 << 10)
#define CLUSTER_LOADS (192 << 10)
#define CLUSTER_ELEMENTS (32 << 10)

/* ---------------------------------------------------------------------------------------------- */
/* Readers: `inner` is what a thread adds a few loads in, `partial` what everything else is added in. */

typedef unsigned long long word64;

static __device__ float half_of(unsigned pair, int shift)
{
    opjit_half half = {(uint16_t)(pair >> shift)};
    return opjit_half_to_float(half);
}

struct read_float16 {
    typedef opjit_half element;
    typedef float inner;
    typedef double partial;
    static __device__ inner one(element value, opjit_dtype) { return opjit_half_to_float(value); }
    static __device__ inner pair(unsigned w) { return half_of(w, 0) + half_of(w, 16); }
    static __device__ inner vector(uint4 v, opjit_dtype) { return (pair(v.x) + pair(v.y)) + (pair(v.z) + pair(v.w)); }
};

struct read_bfloat16 {
    typedef opjit_bfloat16 element;
    typedef float inner;
    typedef double partial;
    static __device__ inner one(element value, opjit_dtype) { return opjit_bfloat16_to_float(value); }
    static __device__ inner pair(unsigned w) { return __uint_as_float(w << 16) + __uint_as_float(w & 0xffff0000u); }
    static __device__ inner vector(uint4 v, opjit_dtype) { return (pair(v.x) + pair(v.y)) + (pair(v.z) + pair(v.w)); }
};

struct read_float32 {
    typedef float element;
    typedef float inner;
    typedef double partial;
    static __device__ inner one(element value, opjit_dtype) { return value; }
    static __device__ inner vector(uint4 v, opjit_dtype)
    {
        return (__uint_as_float(v.x) + __uint_as_float(v.y)) + (__uint_as_float(v.z) + __uint_as_float(v.w));
    }
};

struct read_float64 {
    typedef double element;
    typedef double inner;
    typedef double partial;
    static __device__ inner one(element value, opjit_dtype) { return value; }
    static __device__ inner vector(uint4 v, opjit_dtype)
    {
        return __hiloint2double((int)v.y, (int)v.x) + __hiloint2double((int)v.w, (int)v.z);
    }
};

/* bool, uint8, int8: a byte product with ones adds four at a time. */
struct read_bytes {
    typedef uint8_t element;
    typedef int inner;
    typedef word64 partial;
    static __device__ inner four(unsigned w, opjit_dtype dtype)
    {
        if (dtype == OPJIT_INT8)
            return __dp4a((int)w, 0x01010101, 0);
        return (int)__dp4a(dtype == OPJIT_BOOL ? __vsetne4(w, 0u) : w, 0x01010101u, 0u);
    }
    static __device__ inner one(element value, opjit_dtype dtype) /* of four bytes, three are 0 */
    {
        return dtype == OPJIT_INT8 ? (int)(int8_t)value : dtype == OPJIT_BOOL ? value != 0 : value;
    }
    static __device__ inner vector(uint4 v, opjit_dtype dtype)
    {
        return (four(v.x, dtype) + four(v.y, dtype)) + (four(v.z, dtype) + four(v.w, dtype));
    }
};

/* int16, uint16: likewise, two at a time. */
struct read_int16 {
    typedef uint16_t element;
    typedef int inner;
    typedef word64 partial;
    static __device__ inner two(unsigned w, opjit_dtype dtype)
    {
        return dtype == OPJIT_INT16 ? __dp2a_lo((int)w, 0x0101, 0) : (int)__dp2a_lo(w, 0x0101u, 0u);
    }
    static __device__ inner one(element value, opjit_dtype dtype) { return dtype == OPJIT_INT16 ? (int)(int16_t)value : value; }
    static __device__ inner vector(uint4 v, opjit_dtype dtype)
    {
        return (two(v.x, dtype) + two(v.y, dtype)) + (two(v.z, dtype) + two(v.w, dtype));
    }
};

struct read_int32 {
    typedef uint32_t element;
    typedef long long inner;
    typedef word64 partial;
    static __device__ inner one(element value, opjit_dtype dtype)
    {
        return dtype == OPJIT_INT32 ? (long long)(int)value : (long long)value;
    }
    static __device__ inner vector(uint4 v, opjit_dtype dtype)
    {
        return (one(v.x, dtype) + one(v.y, dtype)) + (one(v.z, dtype) + one(v.w, dtype));
    }
};

struct read_int64 {
    typedef word64 element;
    typedef word64 inner;
    typedef word64 partial;
    static __device__ inner one(element value, opjit_dtype) { return value; }
    static __device__ inner vector(uint4 v, opjit_dtype) { return ((word64)v.y << 32 | v.x) + ((word64)v.w << 32 | v.z); }
};

/* Any dtype, for the conversions and strides that the readers above do not take: an element's bits, from the lowest on. */
static __device__ double floating_of(word64 bits, opjit_dtype dtype)
{
    switch (dtype) {
    case OPJIT_FLOAT16: return half_of((unsigned)bits, 0);
    case OPJIT_BFLOAT16: return __uint_as_float((unsigned)bits << 16);
    case OPJIT_FLOAT32: return __uint_as_float((unsigned)bits);
    default: return __longlong_as_double((long long)bits);
    }
}

static __device__ int64_t integer_of(word64 bits, opjit_dtype dtype)
{
    switch (dtype) {
    case OPJIT_BOOL: return bits != 0;
    case OPJIT_INT8: return (int8_t)bits;
    case OPJIT_INT16: return (int16_t)bits;
    case OPJIT_INT32: return (int32_t)bits;
    default: return (int64_t)bits;
    }
}

/* An element as the result's dtype holds it. */
static __device__ void convert(double *value, word64 bits, opjit_dtype from, opjit_dtype to)
{
    double loaded = from > OPJIT_UINT64    ? floating_of(bits, from)
                    : from == OPJIT_UINT64 ? (double)bits
                                           : (double)integer_of(bits, from);
    switch (to) {
    case OPJIT_FLOAT16: *value = opjit_half_to_float(opjit_float_to_half((float)loaded)); break;
    case OPJIT_BFLOAT16: *value = opjit_bfloat16_to_float(opjit_float_to_bfloat16((float)loaded)); break;
    case OPJIT_FLOAT32: *value = (float)loaded; break;
    default: *value = loaded; break;
    }
}

static __device__ void convert(word64 *value, word64 bits, opjit_dtype from, opjit_dtype to)
{
    if (from > OPJIT_UINT64) {
        double loaded = floating_of(bits, from);
        *value = to == OPJIT_BOOL ? loaded != 0.0 : (word64)(int64_t)loaded;
    } else {
        int64_t loaded = integer_of(bits, from);
        *value = to == OPJIT_BOOL ? loaded != 0 : (word64)loaded;
    }
}

static __device__ void store(void *out, opjit_dtype dtype, double sum)
{
    switch (dtype) {
    case OPJIT_FLOAT16: *(opjit_half *)out = opjit_float_to_half((float)sum); break;
    case OPJIT_BFLOAT16: *(opjit_bfloat16 *)out = opjit_float_to_bfloat16((float)sum); break;
    case OPJIT_FLOAT32: *(float *)out = (float)sum; break;
    default: *(double *)out = sum; break;
    }
}

static __device__ void store(void *out, opjit_dtype dtype, word64 sum)
{
    switch (dtype) {
    case OPJIT_BOOL: *(uint8_t *)out = sum != 0; break;
    case OPJIT_UINT8:
    case OPJIT_INT8: *(uint8_t *)out = (uint8_t)sum; break;
    case OPJIT_UINT16:
    case OPJIT_INT16: *(uint16_t *)out = (uint16_t)sum; break;
    case OPJIT_UINT32:
    case OPJIT_INT32: *(uint32_t *)out = (uint32_t)sum; break;
    default: *(word64 *)out = sum; break;
    }
}

/* ---------------------------------------------------------------------------------------------- */
/* Kernels                                                                                        */

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define HAS_CLUSTERS 1
#else
#define HAS_CLUSTERS 0
#endif

/* The block's sum, in thread 0. */
template <typename partial>
static __device__ partial block_sum(partial value)
{
    __shared__ partial of_warp[THREADS / 32];
    for (int step = 16; step > 0; step /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, step);
    if (threadIdx.x % 32 == 0)
        of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x >= 32)
        return value;
    value = threadIdx.x < THREADS / 32 ? of_warp[threadIdx.x] : (partial)0;
    for (int step = THREADS / 64; step > 0; step /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

/* All blocks of the cluster have come as far as this. The first half says so, the second waits for the others. */
static __device__ void cluster_arrive(void)
{
#if HAS_CLUSTERS
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

#if HAS_CLUSTERS
static __device__ void cluster_wait(void)
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#endif

/* The sum over the cluster, in thread 0 of its first block; value is each block's, in its thread 0. */
template <typename partial>
static __device__ partial cluster_sum(partial value)
{
#if HAS_CLUSTERS
    __shared__ partial of_block[CLUSTER];
    cluster_wait(); /* for every block to have started: only then does its shared memory exist */
    if (threadIdx.x == 0) {
        uint32_t mine = (uint32_t)__cvta_generic_to_shared(of_block + blockIdx.x), first;
        word64 bits;
        memcpy(&bits, &value, sizeof bits);
        asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(first) : "r"(mine));
        asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(first), "l"(bits) : "memory");
    }
    cluster_arrive();
    cluster_wait();
    value = 0;
    for (int block = 0; block < CLUSTER; block++)
        value += ((volatile partial *)of_block)[block];
#endif
    return value;
}

#define ALL_THERE 0x80000000u

/*
 * A counter that a cooperative launch brings along, at the address in two registers and behind its size. The arrivals of
 * all blocks add up to ALL_THERE. This is what grid.sync() of cooperative_groups.h does with it, except that only the first
 * block waits; nvcc takes 0.2 s for that header.
 */
static __device__ unsigned *arrivals(void)
{
    unsigned high, low;
    asm("mov.u32 %0, %%envreg1;" : "=r"(high));
    asm("mov.u32 %0, %%envreg2;" : "=r"(low));
    return (unsigned *)((word64)high << 32 | low) + 1;
}

/* The sum over the grid, in thread 0 of its first block; value is each block's, in its thread 0. */
template <typename partial>
static __device__ partial grid_sum(partial value, partial *of_block)
{
    if (threadIdx.x == 0) {
        of_block[blockIdx.x] = value;
        __threadfence();
        unsigned before = atomicAdd(arrivals(), blockIdx.x > 0 ? 1 : ALL_THERE - (gridDim.x - 1));
        while (blockIdx.x == 0 && ((*(volatile unsigned *)arrivals() ^ before) & ALL_THERE) == 0)
            ;
        __threadfence();
    }
    if (blockIdx.x > 0)
        return value;
    __syncthreads();
    value = 0;
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < gridDim.x; i += THREADS)
        value += __ldcg(of_block + i);
    return block_sum(value);
}

/*
 * Called last: bring the threads' sums together. A function of its own, or every kernel would be compiled with a copy; and
 * not static, or nvcc would put a random number into its name and the binary would not be the same each time.
 */
template <typename partial>
__device__ __noinline__ void finish(partial value, bool clustered, int64_t repeats, void *out, opjit_dtype dtype, void *partials)
{
    value = block_sum(value);
    if (clustered)
        value = cluster_sum(value);
    if (partials)
        value = grid_sum(value, (partial *)partials);
    if (blockIdx.x == 0 && threadIdx.x == 0)
        store(out, dtype, value * (partial)repeats);
}

/* n elements without gaps, aligned to their size. */
template <typename reader>
static __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    sum_packed(const void *memory, opjit_dtype from, int64_t n, int64_t repeats, void *out, opjit_dtype to, void *partials)
{
    typedef typename reader::element element;
    typedef typename reader::inner inner;
    typedef typename reader::partial partial;
    const bool clustered = !partials && gridDim.x > 1;
    const int64_t thread = (int64_t)blockIdx.x * THREADS + threadIdx.x, step = (int64_t)gridDim.x * THREADS;
    const element *data = (const element *)memory;
    const int per_vector = 16 / (int)sizeof *data;
    int64_t head = (int64_t)(-(uintptr_t)data & 15) / (int64_t)sizeof *data; /* elements before the first aligned 16 bytes */
    head = head < n ? head : n;
    const uint4 *vectors = (const uint4 *)(data + head);
    const int64_t count = (n - head) / per_vector, tail = head + count * per_vector;
    partial sum = 0;
    int64_t i = thread;
    if (clustered)
        cluster_arrive();
    for (; i + (IN_FLIGHT - 1) * step < count; i += IN_FLIGHT * step) {
        uint4 v[IN_FLIGHT];
        inner few = 0;
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            v[k] = __ldcs(vectors + i + k * step);
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            few += reader::vector(v[k], from);
        sum += (partial)few;
    }
#pragma unroll 1
    for (; i < count; i += step)
        sum += (partial)reader::vector(vectors[i], from);
    if (thread < head)
        sum += (partial)reader::one(data[thread], from);
    if (thread < n - tail)
        sum += (partial)reader::one(data[tail + thread], from);
    finish(sum, clustered, repeats, out, to, partials);
}

/* Where element i of the layout lies; `index` is wide enough to count them. */
template <typename index>
static __device__ int64_t offset_of(const opjit_layout &layout, index i)
{
    int64_t at = 0;
#pragma unroll 1
    for (int d = (int)layout.dim - 1; d > 0; d--) {
        index size = (index)layout.sizes[d], above = i / size;
        at += (int64_t)(i - above * size) * layout.strides[d];
        i = above;
    }
    return at + (int64_t)i * layout.strides[0];
}

/* The same of more elements than 32 bits count, by the slower division: a function of its own, as `finish` is. */
__device__ __noinline__ int64_t far_offset_of(const opjit_layout &layout, int64_t i)
{
    return offset_of(layout, (uint64_t)i);
}

/* The bits of some elements, all asked for before one is used; where there is none, 0. */
template <typename word>
static __device__ void gather(word64 *bits, const void *data, const int64_t *at)
{
#pragma unroll
    for (int k = 0; k < ELEMENTS; k++)
        bits[k] = at[k] < 0 ? 0 : ((const word *)data)[at[k]];
}

/* Add elements that the sum's dtype holds as they are. */
static __device__ void add_elements(word64 *sum, const word64 *bits, opjit_dtype dtype, int size)
{
    const int unused = dtype >= OPJIT_INT8 && dtype <= OPJIT_INT64 ? 64 - 8 * size : 0; /* above a signed element's sign */
#pragma unroll
    for (int k = 0; k < ELEMENTS; k++)
        *sum += dtype == OPJIT_BOOL ? bits[k] != 0 : (word64)((int64_t)(bits[k] << unused) >> unused);
}

static __device__ void add_elements(double *sum, const word64 *bits, opjit_dtype dtype, int)
{
    float few[ELEMENTS];
    if (dtype == OPJIT_FLOAT64) {
#pragma unroll
        for (int k = 0; k < ELEMENTS; k++)
            *sum += __longlong_as_double((long long)bits[k]);
        return;
    }
#pragma unroll
    for (int k = 0; k < ELEMENTS; k++) {
        unsigned word = (unsigned)bits[k];
        few[k] = dtype == OPJIT_FLOAT16 ? half_of(word, 0) : __uint_as_float(dtype == OPJIT_BFLOAT16 ? word << 16 : word);
    }
    *sum += (double)((few[0] + few[1]) + (few[2] + few[3]));
}

/* Add elements as the dtype `to` holds each of them. The loop is not unrolled: nvcc would take a second longer. */
template <typename partial>
static __device__ void add_converted(partial *sum, word64 *bits, opjit_dtype from, opjit_dtype to)
{
    partial value;
#pragma unroll 1
    for (int k = 0; k < ELEMENTS; k++) {
        convert(&value, bits[0], from, to);
        *sum += value;
#pragma unroll
        for (int next = 1; next < ELEMENTS; next++) /* the next one comes to the front: registers have no index */
            bits[next - 1] = bits[next];
    }
}

/* The one or the other. */
template <typename partial>
static __device__ void add(partial *sum, word64 *bits, opjit_dtype from, opjit_dtype to, int size, bool converts)
{
    if (converts)
        add_converted(sum, bits, from, to);
    else
        add_elements(sum, bits, from, size);
}

/* Any strides and any conversion. Bits that are all 0 add nothing, whatever their dtype. */
static __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    sum_any(const void *data, opjit_dtype from, int size, const __grid_constant__ opjit_layout layout, int64_t n,
            int64_t repeats, void *out, opjit_dtype to, bool converts, void *partials)
{
    const bool clustered = !partials && gridDim.x > 1, narrow = n <= INT32_MAX;
    const int64_t step = (int64_t)gridDim.x * THREADS;
    const bool integral = to <= OPJIT_UINT64;
    word64 whole = 0;
    double real = 0;
    if (clustered)
        cluster_arrive();
#pragma unroll 1
    for (int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x; first < n; first += ELEMENTS * step) {
        int64_t at[ELEMENTS];
        word64 bits[ELEMENTS];
#pragma unroll
        for (int k = 0; k < ELEMENTS; k++) {
            int64_t i = first + k * step;
            at[k] = i >= n ? -1 : narrow ? offset_of(layout, (uint32_t)i) : far_offset_of(layout, i);
        }
        switch (size) {
        case 1: gather<uint8_t>(bits, data, at); break;
        case 2: gather<uint16_t>(bits, data, at); break;
        case 4: gather<uint32_t>(bits, data, at); break;
        default: gather<word64>(bits, data, at); break;
        }
        if (integral)
            add(&whole, bits, from, to, size, converts);
        else
            add(&real, bits, from, to, size, converts);
    }
    if (integral)
        finish(whole, clustered, repeats, out, to, partials);
    else
        finish(real, clustered, repeats, out, to, partials);
}

/* ---------------------------------------------------------------------------------------------- */
/* Launcher                                                                                       */

/* Whether adding first and converting the sum gives what converting first gives. */
static bool converts_after(opjit_dtype from, opjit_dtype to)
{
    if (opjit_is_integral(from))
        return opjit_is_integral(to) && to != OPJIT_BOOL; /* modulo 2^64, then modulo less */
    return from == to || (to == OPJIT_FLOAT32 && from != OPJIT_FLOAT64); /* float16 and bfloat16 are float32 exactly */
}

/* How a call is laid out on the device. */
struct plan {
    cudaLaunchConfig_t config;
    cudaLaunchAttribute attribute;
    void *partials;        /* one per block; NULL where they need none */
    int64_t n, repeats;    /* elements, and how often each counts */
    bool packed, converts; /* without gaps; element by element */
};

/* What is to be added. */
static void describe(plan *p, const opjit_tensor *x, opjit_dtype result, opjit_layout *layout)
{
    *layout = opjit_coalesce(x);
    *p = plan();
    p->repeats = drop_repeats(layout);
    p->n = x->numel / p->repeats;
    p->converts = !converts_after(x->dtype, result);
    p->packed = layout->dim == 1 && layout->strides[0] == 1 && !p->converts;
}

/* By how many blocks, and how their sums come together. */
static opjit_status configure(plan *p, const opjit_tensor *x, cudaStream_t stream)
{
    int device, major, processors;
    const int64_t loads = p->packed ? p->n * (int64_t)opjit_dtype_size(x->dtype) / 16 : p->n;
    const int64_t at_once = THREADS * (p->packed ? IN_FLIGHT : ELEMENTS); /* by a block */
    p->config.stream = stream;
    p->config.blockDim.x = THREADS;
    p->config.blockDim.y = p->config.blockDim.z = 1;
    p->config.gridDim.x = p->config.gridDim.y = p->config.gridDim.z = 1;
    p->config.attrs = &p->attribute;
    if (loads <= ONE_BLOCK_LOADS)
        return OPJIT_OK;
    OPJIT_CUDA_CHECK(cudaGetDevice(&device));
    OPJIT_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    if (major >= 9 && loads <= (p->packed ? CLUSTER_LOADS : CLUSTER_ELEMENTS)) {
        p->config.gridDim.x = CLUSTER;
        p->config.numAttrs = 1;
        p->attribute.id = cudaLaunchAttributeClusterDimension;
        p->attribute.val.clusterDim.x = CLUSTER;
        p->attribute.val.clusterDim.y = p->attribute.val.clusterDim.z = 1;
        return OPJIT_OK;
    }
    OPJIT_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    int64_t useful = loads / at_once + 1, most = (int64_t)processors * BLOCKS_PER_SM;
    p->config.gridDim.x = (unsigned)(useful < most ? useful : most);
    p->config.numAttrs = 1;
    p->attribute.id = cudaLaunchAttributeCooperative;
    p->attribute.val.cooperative = 1;
    return opjit_scratch(&p->partials, (int64_t)p->config.gridDim.x * 8, x);
}

static const void *packed_kernel(opjit_dtype dtype)
{
    switch (dtype) {
    case OPJIT_BOOL:
    case OPJIT_UINT8:
    case OPJIT_INT8: return (const void *)sum_packed<read_bytes>;
    case OPJIT_INT16:
    case OPJIT_UINT16: return (const void *)sum_packed<read_int16>;
    case OPJIT_INT32:
    case OPJIT_UINT32: return (const void *)sum_packed<read_int32>;
    case OPJIT_INT64:
    case OPJIT_UINT64: return (const void *)sum_packed<read_int64>;
    case OPJIT_FLOAT16: return (const void *)sum_packed<read_float16>;
    case OPJIT_BFLOAT16: return (const void *)sum_packed<read_bfloat16>;
    case OPJIT_FLOAT32: return (const void *)sum_packed<read_float32>;
    default: return (const void *)sum_packed<read_float64>;
    }
}

/* By pointer and argument list: the host compiler takes 20 ms for each use of the typed cudaLaunchKernelEx. */
static opjit_status launch(plan *p, const opjit_tensor *x, opjit_layout *layout, const opjit_tensor *out)
{
    int size = (int)opjit_dtype_size(x->dtype);
    void *data = (void *)&x->data, *from = (void *)&x->dtype, *n = &p->n, *repeats = &p->repeats;
    void *result = (void *)&out->data, *to = (void *)&out->dtype;
    void *for_packed[] = {data, from, n, repeats, result, to, &p->partials};
    void *for_any[] = {data, from, &size, layout, n, repeats, result, to, &p->converts, &p->partials};
    const void *kernel = p->packed ? packed_kernel(x->dtype) : (const void *)sum_any;
    void **arguments = p->packed ? for_packed : for_any;
    cudaError_t error = cudaLaunchKernelExC(&p->config, kernel, arguments);
    while (error == cudaErrorCooperativeLaunchTooLarge && p->config.gridDim.x > 1) { /* the stream has a part of the device */
        (void)cudaGetLastError();
        p->config.gridDim.x /= 2;
        error = cudaLaunchKernelExC(&p->config, kernel, arguments);
    }
    return opjit_cuda_status(error, __FILE__, __LINE__, "cudaLaunchKernelExC");
}

opjit_status allreduce_cuda(const opjit_tensor *x, const opjit_dtype *dtype, opjit_tensor *out, cudaStream_t stream)
{
    const opjit_dtype natural = opjit_is_integral(x->dtype) ? OPJIT_INT64 : x->dtype, result = dtype ? *dtype : natural;
    OPJIT_CHECK(x->dtype <= OPJIT_FLOAT64 && result <= OPJIT_FLOAT64,
                "allreduce takes bool, integers and real floating dtypes, not %s",
                opjit_dtype_name(x->dtype <= OPJIT_FLOAT64 ? result : x->dtype));
    OPJIT_TRY(opjit_empty(out, 0, NULL, result, x));
    opjit_layout layout;
    plan p;
    describe(&p, x, result, &layout);
    OPJIT_TRY(configure(&p, x, stream));
    return launch(&p, x, &layout, out);
}
