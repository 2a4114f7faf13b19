/*
 * allreduce for CUDA: the sum of all elements, with torch.sum's dtype rules.
 *
 * A block sums its share of the tensor with 16-byte loads, several in flight in every thread. A small tensor is one
 * block's share and one launch. A larger one leaves a partial sum per block in scratch memory, and a second kernel of
 * one block adds those in a fixed order: nothing is kept between calls, no counter and no memory needs to be zeroed, so
 * the op runs on any stream and under CUDA graphs, and gives the same bits each time. On sm_90 and later the second
 * kernel starts while the first still runs and waits for it on the device (programmatic dependent launch).
 *
 * Accuracy: a thread adds float16, bfloat16 and float32 in float, a few hundred numbers in each of several lanes, and
 * threads and blocks are combined in double; float64 is summed in double, integers and bool modulo 2^64.
 *
 * Layout of the file: readers (what 16 bytes of a dtype add up to), kernels, launcher.
 */
#include "opjit_cuda.h"

#define THREADS 512
#define IN_FLIGHT 4             /* 16-byte loads of a thread before it adds */
#define BLOCKS_PER_SM 2         /* resident at once */
#define ONE_BLOCK_BYTES 131072  /* up to here a second launch costs more than it brings */

/* ---------------------------------------------------------------------------------------------- */
/* Readers: `total` is what a thread adds in; vector() adds 16 bytes, one() adds one element.      */

static __device__ float low_half(unsigned pair)
{
    opjit_half half = {(uint16_t)pair};
    return opjit_half_to_float(half);
}

#define FLOAT_READER(NAME, TYPE, TO_FLOAT, LOW, HIGH) \
    struct NAME { \
        typedef TYPE element; \
        typedef double partial; \
        float lane[4]; \
        __device__ void clear() { lane[0] = lane[1] = lane[2] = lane[3] = 0.0f; } \
        __device__ void one(element value) { lane[0] += TO_FLOAT(value); } \
        __device__ void vector(uint4 v) \
        { \
            lane[0] += LOW(v.x) + HIGH(v.x); \
            lane[1] += LOW(v.y) + HIGH(v.y); \
            lane[2] += LOW(v.z) + HIGH(v.z); \
            lane[3] += LOW(v.w) + HIGH(v.w); \
        } \
        __device__ partial total() const { return ((double)lane[0] + lane[1]) + ((double)lane[2] + lane[3]); } \
    };

#define HALF_LOW(pair) low_half(pair)
#define HALF_HIGH(pair) low_half((pair) >> 16)
#define BFLOAT16_LOW(pair) __uint_as_float((pair) << 16)
#define BFLOAT16_HIGH(pair) __uint_as_float((pair) & 0xffff0000u)

FLOAT_READER(read_float16, opjit_half, opjit_half_to_float, HALF_LOW, HALF_HIGH)
FLOAT_READER(read_bfloat16, opjit_bfloat16, opjit_bfloat16_to_float, BFLOAT16_LOW, BFLOAT16_HIGH)

struct read_float32 {
    typedef float element;
    typedef double partial;
    float lane[4];
    __device__ void clear() { lane[0] = lane[1] = lane[2] = lane[3] = 0.0f; }
    __device__ void one(element value) { lane[0] += value; }
    __device__ void vector(uint4 v)
    {
        lane[0] += __uint_as_float(v.x);
        lane[1] += __uint_as_float(v.y);
        lane[2] += __uint_as_float(v.z);
        lane[3] += __uint_as_float(v.w);
    }
    __device__ partial total() const { return ((double)lane[0] + lane[1]) + ((double)lane[2] + lane[3]); }
};

struct read_float64 {
    typedef double element;
    typedef double partial;
    double lane[2];
    __device__ void clear() { lane[0] = lane[1] = 0.0; }
    __device__ void one(element value) { lane[0] += value; }
    __device__ void vector(uint4 v)
    {
        lane[0] += __hiloint2double((int)v.y, (int)v.x);
        lane[1] += __hiloint2double((int)v.w, (int)v.z);
    }
    __device__ partial total() const { return lane[0] + lane[1]; }
};

/* Integers: WORD(w) is the sum, as int64_t, of the elements in 4 bytes. */
#define INTEGER_READER(NAME, TYPE, ONE, WORD) \
    struct NAME { \
        typedef TYPE element; \
        typedef unsigned long long partial; \
        unsigned long long sum; \
        __device__ void clear() { sum = 0; } \
        __device__ void one(element value) { sum += (unsigned long long)(long long)ONE(value); } \
        __device__ void vector(uint4 v) { sum += (unsigned long long)(WORD(v.x) + WORD(v.y) + WORD(v.z) + WORD(v.w)); } \
        __device__ partial total() const { return sum; } \
    };

#define SAME(value) (value)
#define IS_SET(value) ((value) != 0)
#define BYTES_SIGNED(w) (long long)__dp4a((int)(w), 0x01010101, 0)
#define BYTES_UNSIGNED(w) (long long)__dp4a((unsigned)(w), 0x01010101u, 0u)
#define BYTES_SET(w) (long long)__dp4a(__vsetne4((w), 0u), 0x01010101u, 0u)
#define PAIR_SIGNED(w) (long long)__dp2a_lo((int)(w), 0x0101, 0)
#define PAIR_UNSIGNED(w) (long long)__dp2a_lo((unsigned)(w), 0x0101u, 0u)
#define WORD_SIGNED(w) (long long)(int)(w)
#define WORD_UNSIGNED(w) (long long)(w)

INTEGER_READER(read_bool, uint8_t, IS_SET, BYTES_SET)
INTEGER_READER(read_uint8, uint8_t, SAME, BYTES_UNSIGNED)
INTEGER_READER(read_int8, int8_t, SAME, BYTES_SIGNED)
INTEGER_READER(read_int16, int16_t, SAME, PAIR_SIGNED)
INTEGER_READER(read_uint16, uint16_t, SAME, PAIR_UNSIGNED)
INTEGER_READER(read_int32, int32_t, SAME, WORD_SIGNED)
INTEGER_READER(read_uint32, uint32_t, SAME, WORD_UNSIGNED)

struct read_int64 {
    typedef int64_t element;
    typedef unsigned long long partial;
    unsigned long long sum;
    __device__ void clear() { sum = 0; }
    __device__ void one(element value) { sum += (unsigned long long)value; }
    __device__ void vector(uint4 v)
    {
        sum += ((unsigned long long)v.y << 32 | v.x) + ((unsigned long long)v.w << 32 | v.z);
    }
    __device__ partial total() const { return sum; }
};

/* Any dtype, one element at a time, for the conversions and strides that the readers above do not take. */
static __device__ double load_double(const void *data, int64_t at, opjit_dtype dtype)
{
    switch (dtype) {
    case OPJIT_FLOAT16: return opjit_half_to_float(((const opjit_half *)data)[at]);
    case OPJIT_BFLOAT16: return opjit_bfloat16_to_float(((const opjit_bfloat16 *)data)[at]);
    case OPJIT_FLOAT32: return ((const float *)data)[at];
    default: return ((const double *)data)[at];
    }
}

static __device__ long long load_integer(const void *data, int64_t at, opjit_dtype dtype)
{
    switch (dtype) {
    case OPJIT_BOOL: return ((const uint8_t *)data)[at] != 0;
    case OPJIT_UINT8: return ((const uint8_t *)data)[at];
    case OPJIT_INT8: return ((const int8_t *)data)[at];
    case OPJIT_INT16: return ((const int16_t *)data)[at];
    case OPJIT_UINT16: return ((const uint16_t *)data)[at];
    case OPJIT_INT32: return ((const int32_t *)data)[at];
    case OPJIT_UINT32: return ((const uint32_t *)data)[at];
    default: return ((const int64_t *)data)[at];
    }
}

static __device__ bool is_integral(opjit_dtype dtype)
{
    return dtype <= OPJIT_UINT64;
}

/* A number as the result's dtype would hold it. */
static __device__ double rounded(double value, opjit_dtype to)
{
    switch (to) {
    case OPJIT_FLOAT16: return opjit_half_to_float(opjit_float_to_half((float)value));
    case OPJIT_BFLOAT16: return opjit_bfloat16_to_float(opjit_float_to_bfloat16((float)value));
    case OPJIT_FLOAT32: return (float)value;
    default: return value;
    }
}

static __device__ void load_as(double *value, const void *data, int64_t at, opjit_dtype from, opjit_dtype to)
{
    double loaded;
    if (!is_integral(from))
        loaded = load_double(data, at, from);
    else if (from == OPJIT_UINT64)
        loaded = (double)((const unsigned long long *)data)[at];
    else
        loaded = (double)load_integer(data, at, from);
    *value = rounded(loaded, to);
}

static __device__ void load_as(unsigned long long *value, const void *data, int64_t at, opjit_dtype from, opjit_dtype to)
{
    if (is_integral(from)) {
        long long loaded = load_integer(data, at, from);
        *value = to == OPJIT_BOOL ? loaded != 0 : (unsigned long long)loaded;
    } else {
        double loaded = load_double(data, at, from);
        *value = to == OPJIT_BOOL ? loaded != 0.0 : (unsigned long long)(long long)loaded;
    }
}

/* ---------------------------------------------------------------------------------------------- */
/* Kernels                                                                                        */

static __device__ void store(void *out, opjit_dtype dtype, double sum)
{
    switch (dtype) {
    case OPJIT_FLOAT16: *(opjit_half *)out = opjit_float_to_half((float)sum); break;
    case OPJIT_BFLOAT16: *(opjit_bfloat16 *)out = opjit_float_to_bfloat16((float)sum); break;
    case OPJIT_FLOAT32: *(float *)out = (float)sum; break;
    default: *(double *)out = sum; break;
    }
}

static __device__ void store(void *out, opjit_dtype dtype, unsigned long long sum)
{
    switch (dtype) {
    case OPJIT_BOOL: *(uint8_t *)out = sum != 0; break;
    case OPJIT_UINT8:
    case OPJIT_INT8: *(uint8_t *)out = (uint8_t)sum; break;
    case OPJIT_UINT16:
    case OPJIT_INT16: *(uint16_t *)out = (uint16_t)sum; break;
    case OPJIT_UINT32:
    case OPJIT_INT32: *(uint32_t *)out = (uint32_t)sum; break;
    default: *(unsigned long long *)out = sum; break;
    }
}

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

/* A lone block writes the result, one of many its partial sum. */
template <typename partial>
static __device__ void finish(partial value, void *out, opjit_dtype dtype, partial *partials)
{
    value = block_sum(value);
    if (threadIdx.x != 0)
        return;
    if (partials)
        partials[blockIdx.x] = value;
    else
        store(out, dtype, value);
}

/* Let the second kernel's block come to its wait early; it needs none of this one's threads. */
static __device__ void let_dependents_start(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

/* n elements without gaps; `data` is aligned to its element. */
template <typename reader>
static __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    sum_packed(const typename reader::element *data, int64_t n, void *out, opjit_dtype dtype, typename reader::partial *partials)
{
    const int per_vector = 16 / (int)sizeof *data;
    const int64_t thread = (int64_t)blockIdx.x * THREADS + threadIdx.x, step = (int64_t)gridDim.x * THREADS;
    int64_t head = (int64_t)((16 - ((uintptr_t)data & 15)) & 15) / (int64_t)sizeof *data;
    head = head < n ? head : n;
    const uint4 *vectors = (const uint4 *)(data + head);
    const int64_t count = (n - head) / per_vector, tail = head + count * per_vector;
    reader sum;
    sum.clear();
    let_dependents_start();
    int64_t i = thread;
    for (; i + (IN_FLIGHT - 1) * step < count; i += IN_FLIGHT * step) {
        uint4 v[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            v[k] = __ldcs(vectors + i + k * step);
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            sum.vector(v[k]);
    }
    for (; i < count; i += step)
        sum.vector(vectors[i]);
    if (thread < head)
        sum.one(data[thread]);
    if (thread < n - tail)
        sum.one(data[tail + thread]);
    finish(sum.total(), out, dtype, partials);
}

/* Any strides and any conversion; `index` is wide enough to count the elements. */
template <typename partial, typename index>
static __global__ void __launch_bounds__(THREADS)
    sum_any(const void *data, opjit_dtype from, opjit_layout layout, int64_t n, void *out, opjit_dtype dtype, partial *partials)
{
    const int64_t step = (int64_t)gridDim.x * THREADS;
    partial sum = 0;
    let_dependents_start();
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step) {
        index rest = (index)i;
        int64_t at = 0;
        for (int d = (int)layout.dim - 1; d > 0; d--) {
            index size = (index)layout.sizes[d], above = rest / size;
            at += (int64_t)(rest - above * size) * layout.strides[d];
            rest = above;
        }
        partial value;
        load_as(&value, data, at + (int64_t)rest * layout.strides[0], from, dtype);
        sum += value;
    }
    finish(sum, out, dtype, partials);
}

/* One block: the partial sums, in their order. */
template <typename partial>
static __global__ void __launch_bounds__(THREADS) sum_partials(const partial *partials, int count, void *out, opjit_dtype dtype)
{
    partial sum = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
    for (int i = (int)threadIdx.x; i < count; i += THREADS)
        sum += partials[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        store(out, dtype, sum);
}

/* ---------------------------------------------------------------------------------------------- */
/* Launcher                                                                                       */

/* How a call is laid out on the device. */
struct plan {
    int blocks;
    void *partials; /* NULL where one block does it all */
    cudaStream_t stream;
};

static opjit_status make_plan(plan *p, const opjit_tensor *x, int64_t bytes, cudaStream_t stream)
{
    int processors;
    p->blocks = 1;
    p->partials = NULL;
    p->stream = stream;
    if (bytes <= ONE_BLOCK_BYTES)
        return OPJIT_OK;
    OPJIT_TRY(opjit_multiprocessors(&processors));
    int64_t wanted = bytes / (16 * THREADS * IN_FLIGHT) + 1, most = (int64_t)processors * BLOCKS_PER_SM;
    p->blocks = (int)(wanted < most ? wanted : most);
    return opjit_scratch(&p->partials, p->blocks * 8, x);
}

/* Add the partial sums, where there are any. */
template <typename partial>
static opjit_status combine(const plan *p, const opjit_tensor *out)
{
    OPJIT_TRY(OPJIT_LAUNCHED());
    if (!p->partials)
        return OPJIT_OK;
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = 1;
    config.blockDim = THREADS;
    config.stream = p->stream;
    config.attrs = &early;
    config.numAttrs = 1;
    OPJIT_CUDA_CHECK(cudaLaunchKernelEx(&config, sum_partials<partial>, (const partial *)p->partials, p->blocks, out->data,
                                        out->dtype));
    return OPJIT_OK;
}

template <typename reader>
static opjit_status launch_packed(const plan *p, const opjit_tensor *x, const opjit_tensor *out)
{
    typedef typename reader::partial partial;
    sum_packed<reader><<<p->blocks, THREADS, 0, p->stream>>>((const typename reader::element *)x->data, x->numel, out->data,
                                                             out->dtype, (partial *)p->partials);
    return combine<partial>(p, out);
}

template <typename partial>
static opjit_status launch_any(const plan *p, const opjit_tensor *x, const opjit_layout *layout, const opjit_tensor *out)
{
    if (x->numel < INT32_MAX)
        sum_any<partial, uint32_t><<<p->blocks, THREADS, 0, p->stream>>>(x->data, x->dtype, *layout, x->numel, out->data,
                                                                         out->dtype, (partial *)p->partials);
    else
        sum_any<partial, uint64_t><<<p->blocks, THREADS, 0, p->stream>>>(x->data, x->dtype, *layout, x->numel, out->data,
                                                                         out->dtype, (partial *)p->partials);
    return combine<partial>(p, out);
}

/* Whether adding first and converting the sum gives what converting first gives. */
static bool converts_after(opjit_dtype from, opjit_dtype to)
{
    if (from == to && from != OPJIT_BOOL)
        return true;
    if (opjit_is_integral(from))
        return opjit_is_integral(to) && to != OPJIT_BOOL; /* modulo 2^64, then modulo less */
    return to == OPJIT_FLOAT32 && from != OPJIT_FLOAT64; /* from float16 and bfloat16, exactly */
}

static opjit_status launch(const plan *p, const opjit_tensor *x, const opjit_layout *layout, const opjit_tensor *out)
{
    if (layout->dim > 1 || layout->strides[0] != 1 || !converts_after(x->dtype, out->dtype))
        return opjit_is_integral(out->dtype) ? launch_any<unsigned long long>(p, x, layout, out)
                                             : launch_any<double>(p, x, layout, out);
    switch (x->dtype) {
    case OPJIT_BOOL: return launch_packed<read_bool>(p, x, out);
    case OPJIT_UINT8: return launch_packed<read_uint8>(p, x, out);
    case OPJIT_INT8: return launch_packed<read_int8>(p, x, out);
    case OPJIT_INT16: return launch_packed<read_int16>(p, x, out);
    case OPJIT_UINT16: return launch_packed<read_uint16>(p, x, out);
    case OPJIT_INT32: return launch_packed<read_int32>(p, x, out);
    case OPJIT_UINT32: return launch_packed<read_uint32>(p, x, out);
    case OPJIT_INT64:
    case OPJIT_UINT64: return launch_packed<read_int64>(p, x, out);
    case OPJIT_FLOAT16: return launch_packed<read_float16>(p, x, out);
    case OPJIT_BFLOAT16: return launch_packed<read_bfloat16>(p, x, out);
    case OPJIT_FLOAT32: return launch_packed<read_float32>(p, x, out);
    default: return launch_packed<read_float64>(p, x, out);
    }
}

opjit_status allreduce_cuda(const opjit_tensor *x, const opjit_dtype *dtype, opjit_tensor *out, cudaStream_t stream)
{
    opjit_dtype natural = opjit_is_integral(x->dtype) ? OPJIT_INT64 : x->dtype;
    opjit_dtype result = dtype ? *dtype : natural;
    OPJIT_CHECK(x->dtype <= OPJIT_FLOAT64 && result <= OPJIT_FLOAT64,
                "allreduce takes bool, integers and real floating dtypes, not %s", 
                opjit_dtype_name(x->dtype <= OPJIT_FLOAT64 ? result : x->dtype));
    OPJIT_TRY(opjit_empty(out, 0, NULL, result, x));
    opjit_layout layout = opjit_coalesce(x);
    plan p;
    OPJIT_TRY(make_plan(&p, x, x->numel * (int64_t)opjit_dtype_size(x->dtype), stream));
    return launch(&p, x, &layout, out);
}
