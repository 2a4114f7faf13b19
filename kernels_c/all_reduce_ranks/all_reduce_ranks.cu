/*
 * all_reduce_ranks on CUDA: the elementwise sum of the ranks' tensors, through the inboxes of opjit_peers.h.
 *
 *     words      few bytes: every rank sends all, in words that say by themselves that they have come
 *     one shot   every rank sends all, in tiles, and adds all ranks' tiles
 *     two shots  each rank adds a share of every tile, and sends the sums: less is sent if there are more than two ranks
 *
 * A rank writes into the others' inboxes and reads its own, because a write over NVLink takes half the time of a read.
 * Elements are added in the order of the ranks, float16 and bfloat16 in float, whichever way is taken: all ranks have
 * the same bits, and so do the CPU's.
 *
 * tests/benchmarks/peers.py times the ways beside NCCL's and torch's; choose() has the sizes where they change.
 */
#include "opjit_pack.h"
#include "opjit_peers.h"

#define THREADS 512
#define WORDS_OF_THREAD (OPJIT_WORDS_OF_BLOCK / THREADS)
#define PACKS_OF_THREAD (OPJIT_TILE_BYTES / OPJIT_PACK_BYTES / THREADS)

enum way { WORDS, ONE_SHOT, TWO_SHOTS };

/* ---------------------------------------------------------------------------------------------- */
/* Elements                                                                                       */

/* The type in which elements are added, and the conversions. */
template <typename element>
struct sum {
    typedef element type;
};
template <>
struct sum<opjit_half> {
    typedef float type;
};
template <>
struct sum<opjit_bfloat16> {
    typedef float type;
};

template <typename element>
static __device__ element number(element x)
{
    return x;
}
static __device__ float number(opjit_half x)
{
    return opjit_half_to_float(x);
}
static __device__ float number(opjit_bfloat16 x)
{
    return opjit_bfloat16_to_float(x);
}

template <typename element>
static __device__ void store(element *to, element x)
{
    *to = x;
}
static __device__ void store(opjit_half *to, float x)
{
    *to = opjit_float_to_half(x);
}
static __device__ void store(opjit_bfloat16 *to, float x)
{
    *to = opjit_float_to_bfloat16(x);
}

/* Elements that are sent and added together. */
template <typename element, int bytes>
struct __align__(bytes % 16 == 0 ? 16 : 4) some {
    enum { width = bytes / sizeof(element) };
    element at[width];
};

/* Those from element `first` on; zeros where the tensor ends before. `whole`: they may be loaded as words of 4 bytes. */
template <typename element, int bytes>
static __device__ some<element, bytes> load(const element *x, int64_t first, int64_t n, bool aligned)
{
    typedef some<element, bytes> group;
    group loaded;
    if (aligned && first + group::width <= n)
        return *(const group *)(x + first);
#pragma unroll
    for (int i = 0; i < group::width; i++)
        loaded.at[i] = first + i < n ? x[first + i] : element();
    return loaded;
}

template <typename element, int bytes>
static __device__ void store(element *out, int64_t first, int64_t n, bool aligned, const some<element, bytes> &from)
{
    typedef some<element, bytes> group;
    if (aligned && first + group::width <= n) {
        *(group *)(out + first) = from;
        return;
    }
#pragma unroll
    for (int i = 0; i < group::width; i++)
        if (first + i < n)
            out[first + i] = from.at[i];
}

/* Sums of the ranks' elements, which are added one rank after the other. */
template <typename element, int bytes>
struct sums {
    typedef some<element, bytes> group;
    typename sum<element>::type at[group::width];

    __device__ void add(const group &x, bool first)
    {
#pragma unroll
        for (int i = 0; i < group::width; i++)
            at[i] = first ? number(x.at[i]) : at[i] + number(x.at[i]);
    }

    __device__ group rounded() const
    {
        group result;
#pragma unroll
        for (int i = 0; i < group::width; i++)
            store(&result.at[i], at[i]);
        return result;
    }
};

/* ---------------------------------------------------------------------------------------------- */
/* Kernels                                                                                        */

/* One call's work. */
template <typename element>
struct job {
    const element *x;
    element *out;
    int64_t n;
    int64_t share; /* words of a block, or elements of a tile */
    bool aligned;  /* x and out, to what is loaded at once */
};

/* Each thread sends its words before it looks for the others'; of all ranks' words, it looks for all before it waits. */
template <typename element>
static __global__ void __launch_bounds__(THREADS) sum_words(const opjit_peers p, const job<element> j)
{
    enum { bytes = sizeof(opjit_word) };
    typedef some<element, bytes> group;
    const int64_t block = blockIdx.x * j.share;
    group own[WORDS_OF_THREAD];
    bool came = true;
    const uint32_t count = opjit_begin_words(&p);
#pragma unroll
    for (int k = 0; k < WORDS_OF_THREAD; k++) {
        const int i = threadIdx.x + k * blockDim.x;
        const int64_t first = (block + i) * group::width;
        if (i >= j.share || first >= j.n)
            break;
        own[k] = load<element, bytes>(j.x, first, j.n, j.aligned);
        opjit_word word;
        memcpy(&word, &own[k], sizeof word);
        for (int r = 0; r < p.world; r++)
            if (r != p.rank)
                opjit_push(&p, r, count, i, word);
    }
#pragma unroll
    for (int k = 0; k < WORDS_OF_THREAD; k++) {
        const int i = threadIdx.x + k * blockDim.x;
        const int64_t first = (block + i) * group::width;
        if (i >= j.share || first >= j.n)
            break;
        opjit_word words[OPJIT_RANKS];
        bool here[OPJIT_RANKS];
        sums<element, bytes> total;
#pragma unroll
        for (int r = 0; r < OPJIT_RANKS; r++)
            if (r < p.world && r != p.rank)
                here[r] = opjit_peek(&p, r, count, i, &words[r]);
#pragma unroll
        for (int r = 0; r < OPJIT_RANKS; r++) {
            if (r >= p.world)
                break;
            group of_rank = own[k];
            if (r != p.rank) {
                if (!here[r])
                    came = came && opjit_pull(&p, r, count, i, &words[r]);
                memcpy(&of_rank, &words[r], sizeof of_rank);
            }
            total.add(of_rank, r == 0);
        }
        store<element, bytes>(j.out, first, j.n, j.aligned, total.rounded());
    }
    (void)opjit_end_words(&p, count, came);
}

/* The sum of one group of elements: this rank's from x, the others' from their tiles. */
template <typename element>
static __device__ some<element, OPJIT_PACK_BYTES> sum_at(const opjit_peers *p, const job<element> &j, uint32_t count,
                                                         int64_t first, int i)
{
    typedef some<element, OPJIT_PACK_BYTES> group;
    sums<element, OPJIT_PACK_BYTES> total;
#pragma unroll
    for (int r = 0; r < OPJIT_RANKS; r++) {
        if (r >= p->world)
            break;
        total.add(r == p->rank ? load<element, OPJIT_PACK_BYTES>(j.x, first, j.n, j.aligned)
                               : ((const group *)opjit_tile(p, OPJIT_RING_A, p->rank, r, count))[i],
                  r == 0);
    }
    return total.rounded();
}

template <typename element>
static __global__ void __launch_bounds__(THREADS) one_shot(const opjit_peers p, const job<element> j)
{
    typedef some<element, OPJIT_PACK_BYTES> group;
    const int packs = (int)(j.share / group::width);
    const int64_t tiles = (j.n + j.share - 1) / j.share;
    const uint32_t begin = opjit_begin_tiles(&p, OPJIT_RING_A);
    uint32_t count = begin;
    for (int64_t tile = blockIdx.x; tile - gridDim.x < tiles; tile += gridDim.x, count++) {
        if (tile < tiles) {
            for (int i = threadIdx.x; i < packs; i += THREADS) {
                const group own = load<element, OPJIT_PACK_BYTES>(j.x, tile * j.share + i * group::width, j.n, j.aligned);
                for (int r = 0; r < p.world; r++)
                    if (r != p.rank)
                        ((group *)opjit_tile(&p, OPJIT_RING_A, r, p.rank, count))[i] = own;
            }
            opjit_send_tiles(&p, OPJIT_RING_A, count);
        }
        if (count == begin)
            continue;
        if (!opjit_await_tiles(&p, OPJIT_RING_A, count - 1))
            return;
        for (int i = threadIdx.x; i < packs; i += THREADS) {
            const int64_t first = (tile - gridDim.x) * j.share + i * group::width;
            store<element, OPJIT_PACK_BYTES>(j.out, first, j.n, j.aligned, sum_at(&p, j, count - 1, first, i));
        }
    }
    opjit_end_tiles(&p, OPJIT_RING_A, count - 1);
}

/* A step has a tile for each rank to add. While one step's tiles are on their way, the sums of the step before are, too. */
template <typename element>
static __global__ void __launch_bounds__(THREADS) two_shots(const opjit_peers p, const job<element> j)
{
    typedef some<element, OPJIT_PACK_BYTES> group;
    const int packs = (int)(j.share / group::width);
    const int64_t of_step = j.share * p.world, steps = (j.n + of_step - 1) / of_step;
    const uint32_t begin_a = opjit_begin_tiles(&p, OPJIT_RING_A), begin_b = opjit_begin_tiles(&p, OPJIT_RING_B);
    uint32_t done = 0;
    for (int64_t step = blockIdx.x; step - 2 * (int64_t)gridDim.x < steps; step += gridDim.x, done++) {
        const int64_t before = step - gridDim.x, first_step = before - gridDim.x;
        if (step < steps) {
            for (int k = 1; k < p.world; k++) {
                const int r = (p.rank + k) % p.world;
                group *tile = (group *)opjit_tile(&p, OPJIT_RING_A, r, p.rank, begin_a + done);
                for (int i = threadIdx.x; i < packs; i += THREADS)
                    tile[i] = load<element, OPJIT_PACK_BYTES>(j.x, step * of_step + r * j.share + i * group::width, j.n,
                                                              j.aligned);
            }
            opjit_send_tiles(&p, OPJIT_RING_A, begin_a + done);
        }
        if (before >= 0 && before < steps) {
            if (!opjit_await_tiles(&p, OPJIT_RING_A, begin_a + done - 1))
                return;
            for (int i = threadIdx.x; i < packs; i += THREADS) {
                const int64_t first = before * of_step + p.rank * j.share + i * group::width;
                const group total = sum_at(&p, j, begin_a + done - 1, first, i);
                for (int k = 1; k < p.world; k++)
                    ((group *)opjit_tile(&p, OPJIT_RING_B, (p.rank + k) % p.world, p.rank, begin_b + done - 1))[i] = total;
                store<element, OPJIT_PACK_BYTES>(j.out, first, j.n, j.aligned, total);
            }
            opjit_send_tiles(&p, OPJIT_RING_B, begin_b + done - 1);
        }
        if (first_step < 0)
            continue;
        if (!opjit_await_tiles(&p, OPJIT_RING_B, begin_b + done - 2))
            return;
        for (int k = 1; k < p.world; k++) {
            const int r = (p.rank + k) % p.world;
            const group *tile = (const group *)opjit_tile(&p, OPJIT_RING_B, p.rank, r, begin_b + done - 2);
            for (int i = threadIdx.x; i < packs; i += THREADS)
                store<element, OPJIT_PACK_BYTES>(j.out, first_step * of_step + r * j.share + i * group::width, j.n, j.aligned,
                                                 tile[i]);
        }
    }
    opjit_end_tiles(&p, OPJIT_RING_A, begin_a + done - 2);
    opjit_end_tiles(&p, OPJIT_RING_B, begin_b + done - 2);
}

/* ---------------------------------------------------------------------------------------------- */
/* Launcher                                                                                       */

#ifndef ALL_REDUCE_WAY /* a benchmark sets it */
#define ALL_REDUCE_WAY choose(bytes, world)
#endif

static OPJIT_UNUSED enum way choose(int64_t bytes, int world)
{
    if (bytes * (world - 1) <= 512 * 1024)
        return WORDS;
    return world == 2 ? ONE_SHOT : TWO_SHOTS;
}

template <typename element>
static opjit_status launch(opjit_peers *p, const job<element> *j, void (*kernel)(opjit_peers, job<element>), int64_t blocks,
                           int threads, cudaStream_t stream)
{
    OPJIT_TRY(opjit_peers_launch(p, (const void *)kernel, (int)blocks, threads, 0, stream));
    kernel<<<(unsigned)blocks, threads, 0, stream>>>(*p, *j);
    return OPJIT_LAUNCHED();
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t parts(int64_t n, int64_t of)
{
    return (n + of - 1) / of;
}

/* Words: 128 threads of a block, and more of both for more words. */
template <typename element>
static opjit_status launch_words(opjit_peers *p, job<element> *j, cudaStream_t stream)
{
    const int64_t words = parts(j->n, sizeof(opjit_word) / sizeof(element));
    const int64_t blocks = least(parts(words, 128), OPJIT_BLOCKS);
    j->share = parts(words, blocks);
    return launch(p, j, sum_words<element>, blocks, (int)least(parts(j->share, 32) * 32, THREADS), stream);
}

/* Tiles: small ones, if not all blocks would get one else. */
template <typename element>
static opjit_status launch_tiles(opjit_peers *p, job<element> *j, bool twice, cudaStream_t stream)
{
    const int64_t pack = OPJIT_PACK_BYTES / sizeof(element), packs = parts(j->n, pack * (twice ? p->world : 1));
    const int64_t of_block = parts(parts(packs, OPJIT_BLOCKS), 32) * 32;
    const int64_t of_tile = least(of_block, OPJIT_TILE_BYTES / OPJIT_PACK_BYTES);
    j->share = of_tile * pack;
    return launch(p, j, twice ? two_shots<element> : one_shot<element>, least(parts(packs, of_tile), OPJIT_BLOCKS), THREADS,
                  stream);
}

template <typename element>
static opjit_status reduce_as(opjit_peers *p, const void *x, void *out, int64_t n, cudaStream_t stream)
{
    const int64_t bytes = n * (int64_t)sizeof(element);
    const int world = p->world;
    const enum way way = ALL_REDUCE_WAY;
    const size_t at_once = way == WORDS ? 4 : OPJIT_PACK_BYTES;
    job<element> j = {(const element *)x, (element *)out, n, 0, opjit_is_aligned(x, at_once) && opjit_is_aligned(out, at_once)};
    (void)bytes;
    if constexpr (sizeof(element) <= 4)
        if (way == WORDS && bytes <= (int64_t)sizeof(opjit_word) * OPJIT_WORDS_OF_BLOCK * OPJIT_BLOCKS)
            return launch_words(p, &j, stream);
    j.aligned = opjit_is_aligned(x, OPJIT_PACK_BYTES) && opjit_is_aligned(out, OPJIT_PACK_BYTES);
    return launch_tiles(p, &j, way == TWO_SHOTS, stream);
}

/* The sum of contiguous elements; `x` may be `out`. */
static opjit_status reduce(const opjit_tensor *x, const char *group, void *out, cudaStream_t stream)
{
    opjit_peers peers;
    opjit_tensor packed;
    OPJIT_TRY(opjit_peers_of(&peers, group, 0));
    opjit_agree(&peers, x->numel << 8 | x->dtype);
    if (x->numel == 0)
        return OPJIT_OK;
    OPJIT_TRY(opjit_contiguous(&packed, x));
    switch (x->dtype) {
    case OPJIT_FLOAT16: return reduce_as<opjit_half>(&peers, packed.data, out, x->numel, stream);
    case OPJIT_BFLOAT16: return reduce_as<opjit_bfloat16>(&peers, packed.data, out, x->numel, stream);
    case OPJIT_FLOAT32: return reduce_as<float>(&peers, packed.data, out, x->numel, stream);
    case OPJIT_FLOAT64: return reduce_as<double>(&peers, packed.data, out, x->numel, stream);
    case OPJIT_INT32: return reduce_as<uint32_t>(&peers, packed.data, out, x->numel, stream); /* wraps, as in torch */
    case OPJIT_INT64: return reduce_as<uint64_t>(&peers, packed.data, out, x->numel, stream);
    default:
        OPJIT_FAIL("takes float16, bfloat16, float32, float64, int32 or int64, not %s", opjit_dtype_name(x->dtype));
    }
}

#ifdef OPJIT_OP_all_reduce_ranks
opjit_status all_reduce_ranks_cuda(const opjit_tensor *x, const char *group, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    return reduce(x, group, out->data, stream);
}
#else
template <typename word>
static __global__ void scatter(const word *from, word *to, const opjit_layout layout, int64_t n)
{
    OPJIT_KERNEL_LOOP(i, n)
        to[opjit_offset(layout, i)] = from[i];
}

opjit_status all_reduce_ranks__cuda(opjit_tensor *x, const char *group, cudaStream_t stream)
{
    const int64_t n = x->numel, size = (int64_t)opjit_dtype_size(x->dtype);
    const int blocks = opjit_blocks(n, 256);
    void *sums;
    if (x->contiguous)
        return reduce(x, group, x->data, stream);
    OPJIT_TRY(opjit_scratch(&sums, n * size, x));
    OPJIT_TRY(reduce(x, group, sums, stream));
    const opjit_layout layout = opjit_layout_of(x);
    if (size == 2)
        scatter<<<blocks, 256, 0, stream>>>((const uint16_t *)sums, (uint16_t *)x->data, layout, n);
    else if (size == 4)
        scatter<<<blocks, 256, 0, stream>>>((const uint32_t *)sums, (uint32_t *)x->data, layout, n);
    else
        scatter<<<blocks, 256, 0, stream>>>((const uint64_t *)sums, (uint64_t *)x->data, layout, n);
    return OPJIT_LAUNCHED();
}
#endif
