/*
 * allreduce on CUDA: the sum of all elements, with torch.sum's dtype rules.
 *
 * A block sums its share of the tensor with 16-byte loads, several in flight in every thread. A small tensor needs one
 * block. Otherwise, a full grid of blocks writes its sums to scratch memory. The blocks wait for each other, and the
 * first block adds the sums. Only a cooperative launch guarantees that all blocks are resident, so that they can wait.
 * It costs the host 0.4 us more than another launch, but a second launch would cost 2.5 us.
 *
 * Sums are added in a fixed order and nothing is kept between calls: the op gives the same bits each time, on any
 * stream and under CUDA graphs. Elements that a stride of 0 repeats are added once, and the sum is multiplied.
 *
 * Accuracy: a thread adds at most 128 bytes of float16, bfloat16 or float32 in float; all else is added in double.
 * Integers and bool are added modulo 2^64.
 *
 * Large sums are as fast as reading the memory once: tests/benchmarks/bandwidth.py.
 *
 * Layout of this file: elements, kernels, launcher.
 */
#define _CG_LIMIT_INCLUDED_DEPENDENCIES /* without libcu++, which nvcc needs 3 s to read */
#include <cooperative_groups.h>

#include "opjit_convert.h"
#include "opjit_elementwise.h"
#include "opjit_reduce.h"

#include "allreduce.h"

#define THREADS 512
#define BLOCKS_PER_SM 2      /* resident at once */
#define IN_FLIGHT 8          /* 16-byte loads of a thread before it adds */
#define ELEMENTS 4           /* the same if it loads single elements */
#define ONE_BLOCK_LOADS 4096 /* the maximum for one block, which is then as fast as waiting for other blocks */

/* ---------------------------------------------------------------------------------------------- */
/* Elements: a thread adds a few in the type `few`; all else is added in the type `many`          */

typedef unsigned long long word64;

template <typename element>
struct sums;
template <>
struct sums<double> {
    typedef double few, many;
};
template <>
struct sums<float> {
    typedef float few;
    typedef double many;
};
template <>
struct sums<opjit_half> : sums<float> {
};
template <>
struct sums<opjit_bfloat16> : sums<float> {
};
template <>
struct sums<uint8_t> {
    typedef unsigned few;
    typedef word64 many;
};
template <>
struct sums<uint16_t> : sums<uint8_t> {
};
template <>
struct sums<uint32_t> {
    typedef word64 few, many;
};
template <>
struct sums<word64> : sums<uint32_t> {
};

/* An element as a number. `flip` makes signed integers unsigned by their sign bits; job.bias corrects the sum. */
template <typename integer>
static __device__ integer number(integer x, unsigned flip)
{
    return (integer)(x ^ flip);
}
static __device__ float number(float x, unsigned)
{
    return x;
}
static __device__ double number(double x, unsigned)
{
    return x;
}
static __device__ float number(opjit_half x, unsigned)
{
    return opjit_half_to_float(x);
}
static __device__ float number(opjit_bfloat16 x, unsigned)
{
    return opjit_bfloat16_to_float(x);
}

/* 16 bytes, which are read only once. */
template <typename element>
static __device__ opjit_pack<element> load(const opjit_pack<element> *from)
{
    const uint4 words = __ldcs((const uint4 *)from);
    opjit_pack<element> pack;
    memcpy(&pack, &words, sizeof pack);
    return pack;
}

template <typename element>
static __device__ typename sums<element>::few sum_of(const opjit_pack<element> &x, unsigned flip)
{
    typename sums<element>::few sum = 0;
#pragma unroll
    for (int i = 0; i < opjit_pack<element>::width; i++)
        sum += number(x.at[i], flip);
    return sum;
}

/* Bytes, four at a time: a product with ones adds them. */
static __device__ unsigned sum_of(const opjit_pack<uint8_t> &x, unsigned flip)
{
    unsigned words[4], sum = 0;
    memcpy(words, &x, sizeof words);
#pragma unroll
    for (int i = 0; i < 4; i++)
        sum = __dp4a(words[i] ^ flip, 0x01010101u, sum);
    return sum;
}

/* ---------------------------------------------------------------------------------------------- */
/* Kernels                                                                                        */

/* One call's work. */
struct job {
    const void *data;
    opjit_layout layout; /* of the elements, each once */
    int64_t n, repeats;  /* elements, and how often each counts */
    int64_t size;        /* bytes of an element */
    opjit_dtype from, to;
    unsigned flip;         /* in sum_packed, the sign bits of signed integers */
    word64 bias;           /* what flipping those adds to the sum */
    void *out, *of_blocks; /* the result; memory for the blocks' sums */
};

/* The grid's sum, in thread 0 of its first block. */
template <typename many>
static __device__ many grid_sum(many value, many *of_block)
{
    value = opjit_block_reduce(value, opjit_add());
    if (gridDim.x == 1)
        return value;
    if (threadIdx.x == 0)
        of_block[blockIdx.x] = value;
    cooperative_groups::this_grid().sync();
    if (blockIdx.x > 0)
        return value;
    value = 0;
    for (unsigned i = threadIdx.x; i < gridDim.x; i += THREADS)
        value += of_block[i];
    return opjit_block_reduce(value, opjit_add());
}

static __device__ void store(const job &j, double sum)
{
    sum *= (double)j.repeats;
    if (j.to == OPJIT_FLOAT64)
        *(double *)j.out = sum;
    else
        opjit_store_float(j.out, 0, j.to, (float)sum);
}

static __device__ void store(const job &j, word64 sum)
{
    sum -= j.bias;
    if (opjit_is_integral(j.to))
        opjit_store_int64(j.out, 0, j.to, (int64_t)(sum * (word64)j.repeats));
    else
        store(j, (double)(int64_t)sum);
}

/*
 * The end of a kernel: add the threads' sums and store the result. Compiled once for each type instead of into every
 * kernel. It is not static, because nvcc puts a random number into the names of static functions and the binary must be
 * reproducible.
 */
template <typename many>
__device__ __noinline__ void finish(const job &j, many sum)
{
    sum = grid_sum(sum, (many *)j.of_blocks);
    if (blockIdx.x == 0 && threadIdx.x == 0)
        store(j, sum);
}

/* Elements without gaps: packs from the first aligned 16 bytes on, and the elements around them. */
template <typename element>
static __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) sum_packed(const __grid_constant__ job j)
{
    typedef typename sums<element>::few few;
    typedef typename sums<element>::many many;
    typedef opjit_pack<element> pack;
    const int64_t thread = (int64_t)blockIdx.x * THREADS + threadIdx.x, step = (int64_t)gridDim.x * THREADS;
    const element *data = (const element *)j.data;
    const int64_t unaligned = (int64_t)(-(uintptr_t)data & 15) / (int64_t)sizeof *data,
                  head = unaligned < j.n ? unaligned : j.n;
    const int64_t count = (j.n - head) / pack::width, tail = head + count * pack::width;
    const pack *packs = (const pack *)(data + head);
    many sum = 0;
    int64_t i = thread;
    for (; i + (IN_FLIGHT - 1) * step < count; i += IN_FLIGHT * step) {
        pack x[IN_FLIGHT];
        few some = 0;
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            x[k] = load(packs + i + k * step);
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            some += sum_of(x[k], j.flip);
        sum += (many)some;
    }
#pragma unroll 1
    for (; i < count; i += step)
        sum += (many)sum_of(load(packs + i), j.flip);
    if (thread < head)
        sum += (many)number(data[thread], j.flip);
    if (thread < j.n - tail)
        sum += (many)number(data[tail + thread], j.flip);
    finish(j, sum);
}

/* The bits of elements at some places, all loaded before one is used. A position below 0 does not have an element,
 * so it counts as 0. */
template <typename word>
static __device__ void gather(word64 *bits, const void *data, const int64_t *at)
{
#pragma unroll
    for (int k = 0; k < ELEMENTS; k++)
        bits[k] = at[k] < 0 ? 0 : ((const word *)data)[at[k]];
}

/* Add an element. An integer sum first converts it to the result's dtype. */
static __device__ void add(double *sum, word64 bits, const job &j)
{
    *sum += opjit_load_double(&bits, 0, j.from);
}
static __device__ void add(word64 *sum, word64 bits, const job &j)
{
    if (opjit_is_floating(j.from))
        *sum += (word64)opjit_integer_of(opjit_load_double(&bits, 0, j.from), j.to);
    else if (j.to == OPJIT_BOOL)
        *sum += bits != 0;
    else
        *sum += (word64)opjit_load_int64(&bits, 0, j.from);
}

/* Elements of any dtype and strides. */
template <typename many>
static __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) sum_any(const __grid_constant__ job j)
{
    const int64_t step = (int64_t)gridDim.x * THREADS;
    many sum = 0;
#pragma unroll 1
    for (int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x; first < j.n; first += ELEMENTS * step) {
        int64_t at[ELEMENTS];
        word64 bits[ELEMENTS];
#pragma unroll
        for (int k = 0; k < ELEMENTS; k++)
            at[k] = first + k * step < j.n ? opjit_offset(j.layout, first + k * step) : -1;
        switch (j.size) {
        case 1: gather<uint8_t>(bits, j.data, at); break;
        case 2: gather<uint16_t>(bits, j.data, at); break;
        case 4: gather<uint32_t>(bits, j.data, at); break;
        default: gather<word64>(bits, j.data, at); break;
        }
#pragma unroll
        for (int k = 0; k < ELEMENTS; k++)
            add(&sum, bits[k], j);
    }
    finish(j, sum);
}

/* ---------------------------------------------------------------------------------------------- */
/* Launcher                                                                                       */

typedef void kernel(job);

static kernel *packed_kernel(opjit_dtype dtype)
{
    switch (dtype) {
    case OPJIT_BOOL:
    case OPJIT_UINT8:
    case OPJIT_INT8: return sum_packed<uint8_t>;
    case OPJIT_INT16:
    case OPJIT_UINT16: return sum_packed<uint16_t>;
    case OPJIT_INT32:
    case OPJIT_UINT32: return sum_packed<uint32_t>;
    case OPJIT_INT64:
    case OPJIT_UINT64: return sum_packed<word64>;
    case OPJIT_FLOAT16: return sum_packed<opjit_half>;
    case OPJIT_BFLOAT16: return sum_packed<opjit_bfloat16>;
    case OPJIT_FLOAT32: return sum_packed<float>;
    default: return sum_packed<double>;
    }
}

/* How sum_packed makes signed elements unsigned. */
static void flip_signs(job *j)
{
    if (j->from == OPJIT_INT8 || j->from == OPJIT_INT16 || j->from == OPJIT_INT32) {
        j->flip = j->size == 1 ? 0x80808080u : j->size == 2 ? 0x80008000u : 0x80000000u;
        j->bias = (word64)j->n << (8 * j->size - 1);
    }
}

/* One block, or as many as have something to do and can be resident at once. */
static opjit_status launch(kernel *run, job *j, bool packed, const opjit_tensor *x, cudaStream_t stream)
{
    const int64_t loads = packed ? j->n * j->size / 16 : j->n;
    const int64_t useful = loads / (THREADS * (packed ? IN_FLIGHT : ELEMENTS)) + 1;
    void *arguments[] = {j};
    int processors;
    if (loads <= ONE_BLOCK_LOADS) {
        run<<<1, THREADS, 0, stream>>>(*j);
        return OPJIT_LAUNCHED();
    }
    OPJIT_TRY(opjit_multiprocessors(&processors));
    int blocks = processors * BLOCKS_PER_SM < useful ? processors * BLOCKS_PER_SM : (int)useful;
    OPJIT_TRY(opjit_scratch(&j->of_blocks, (int64_t)blocks * 8, x));
    cudaError_t error = cudaLaunchCooperativeKernel(run, blocks, THREADS, arguments, 0, stream);
    while (error == cudaErrorCooperativeLaunchTooLarge && blocks > 1) { /* the stream has only a part of the device */
        (void)cudaGetLastError();
        blocks /= 2;
        error = cudaLaunchCooperativeKernel(run, blocks, THREADS, arguments, 0, stream);
    }
    return opjit_cuda_status(error, __FILE__, __LINE__, "cudaLaunchCooperativeKernel");
}

opjit_status allreduce_cuda(const opjit_tensor *x, const opjit_dtype *dtype, opjit_tensor *out, cudaStream_t stream)
{
    int64_t sizes[OPJIT_MAX_DIM];
    opjit_tensor view;
    const opjit_tensor *const views[] = {&view};
    opjit_elements elements;
    job j = job();
    OPJIT_TRY(result_dtype(x, dtype, &j.to));
    OPJIT_TRY(opjit_empty(out, 0, NULL, j.to, x));
    j.repeats = without_repeats(x, sizes, &view);
    OPJIT_TRY(opjit_elements_of(&elements, 1, views));
    j.layout = opjit_layout_of(&elements);
    j.data = x->data;
    j.n = view.numel;
    j.out = out->data;
    j.from = x->dtype;
    j.size = (int64_t)opjit_dtype_size(x->dtype);
    const bool converts = !converts_the_sum(j.from, j.to, x->numel); /* element by element */
    if (!converts && j.layout.dim == 1 && j.layout.strides[0] == 1) {
        flip_signs(&j);
        return launch(packed_kernel(j.from), &j, true, x, stream);
    }
    return launch(opjit_is_integral(converts ? j.to : j.from) ? sum_any<word64> : sum_any<double>, &j, false, x,
                  stream);
}
