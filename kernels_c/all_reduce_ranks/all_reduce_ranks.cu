/*
 * all_reduce_ranks on CUDA: the elementwise sum of the ranks' tensors, through the inboxes of opjit_messages.h.
 *
 *     words      few bytes: every rank sends all, in words that say by themselves that they have come
 *     one shot   every rank sends all, in tiles, and adds all ranks' tiles
 *     two shots  each rank adds a share of every tile, and sends the sums: less is sent if there are more than two ranks
 *     in place   the tensors are in memory that all ranks reach: each rank adds a share of them, and stores it in all
 *
 * Otherwise, a rank writes into the inboxes of the other ranks and reads from its inbox, because a write over NVLink is
 * twice as fast as a read. Elements are added in the order of the ranks, and float16 and bfloat16 in float, in each of
 * the four ways. Therefore all ranks have the same bits, and so does the CPU.
 *
 * tests/benchmarks/collectives.py compares them with NCCL's and torch's. choose() has the sizes at which they change.
 */
#include "opjit_collective.h"

#define THREADS 512
#define WORDS_OF_THREAD (OPJIT_WORDS_OF_BLOCK / THREADS)

enum way { WORDS, ONE_SHOT, TWO_SHOTS };

/* One call's work. */
template <typename element>
struct job {
    const element *x;
    element *out;
    int64_t n;
    int64_t share;          /* words of a block, elements of a tile, or in_place's packs of a rank */
    bool aligned;           /* x and out are aligned for vector loads */
    opjit_ranks_data ranks; /* the tensors of all ranks, for in_place */
};

/* ---------------------------------------------------------------------------------------------- */
/* Kernels                                                                                        */

/* Each thread sends its words before it looks for the words of other ranks. */
template <typename element>
static __global__ void __launch_bounds__(THREADS) sum_words(const opjit_peers p, const job<element> j)
{
    enum { bytes = sizeof(opjit_word) };
    typedef opjit_some<element, bytes> some;
    const int64_t of_block = opjit_least(j.share, opjit_parts(j.n, some::width) - blockIdx.x * j.share);
    const int64_t block = blockIdx.x * j.share;
    some own[WORDS_OF_THREAD];
    opjit_word words[OPJIT_RANKS];
    bool came = true;
    const uint32_t count = opjit_begin_words(&p);
#pragma unroll
    for (int k = 0; k < WORDS_OF_THREAD; k++) {
        const int i = threadIdx.x + k * blockDim.x;
        if (i >= of_block)
            break;
        own[k] = opjit_load_some<element, bytes>(j.x, (block + i) * some::width, j.n, j.aligned);
        memcpy(&words[0], &own[k], sizeof words[0]);
        opjit_push_all(&p, count, i, words[0]);
    }
#pragma unroll
    for (int k = 0; k < WORDS_OF_THREAD; k++) {
        const int i = threadIdx.x + k * blockDim.x;
        opjit_sums<element, bytes> sums;
        if (i >= of_block)
            break;
        came = came && opjit_pull_all(&p, count, i, words);
#pragma unroll
        for (int r = 0; r < OPJIT_RANKS; r++) {
            some x = own[k];
            if (r >= p.world)
                break;
            if (r != p.rank)
                memcpy(&x, &words[r], sizeof x);
            sums.add(x, r == 0);
        }
        opjit_store_some(j.out, (block + i) * some::width, j.n, j.aligned, sums.rounded());
    }
    (void)opjit_end_words(&p, count, came);
}

/* A tile is sent while the one before is added. */
template <typename element>
static __global__ void __launch_bounds__(THREADS, 2) one_shot(const opjit_peers p, const job<element> j)
{
    const int64_t tiles = opjit_parts(j.n, j.share), step = gridDim.x;
    const uint32_t begin = opjit_begin_tiles(&p, OPJIT_RING_A);
    uint32_t count = begin;
    opjit_packs<element> some;
    for (int64_t tile = blockIdx.x; tile - step < tiles; tile += step, count++) {
        if (tile < tiles) {
            some.load(j.x, tile * j.share, j.n, j.aligned);
            for (int r = 0; r < p.world; r++)
                if (r != p.rank)
                    some.store(opjit_tile(&p, OPJIT_RING_A, r, p.rank, count));
            opjit_send_tiles(&p, OPJIT_RING_A, count);
        }
        if (count == begin)
            continue;
        some.load(j.x, (tile - step) * j.share, j.n, j.aligned);
        if (!opjit_await_tiles(&p, OPJIT_RING_A, count - 1))
            return;
        some.add(&p, count - 1);
        some.store(j.out, (tile - step) * j.share, j.n, j.aligned);
    }
    opjit_end_tiles(&p, OPJIT_RING_A, count - 1);
}

/* A step has a tile for each rank to add. Three steps overlap: one sends tiles, one adds and sends sums, one stores. */
template <typename element>
static __global__ void __launch_bounds__(THREADS, 2) two_shots(const opjit_peers p, const job<element> j)
{
    const int64_t of_step = j.share * p.world, steps = opjit_parts(j.n, of_step), grid = gridDim.x;
    const uint32_t a = opjit_begin_tiles(&p, OPJIT_RING_A), b = opjit_begin_tiles(&p, OPJIT_RING_B);
    uint32_t done = 0;
    opjit_packs<element> some;
    for (int64_t step = blockIdx.x; step - 2 * grid < steps; step += grid, done++) {
        if (step < steps) {
            for (int k = 1; k < p.world; k++) {
                const int r = (p.rank + k) % p.world;
                some.load(j.x, step * of_step + r * j.share, j.n, j.aligned);
                some.store(opjit_tile(&p, OPJIT_RING_A, r, p.rank, a + done));
            }
            opjit_send_tiles(&p, OPJIT_RING_A, a + done);
        }
        if (done >= 1 && step - grid < steps) {
            const int64_t own = (step - grid) * of_step + p.rank * j.share;
            some.load(j.x, own, j.n, j.aligned);
            if (!opjit_await_tiles(&p, OPJIT_RING_A, a + done - 1))
                return;
            some.add(&p, a + done - 1);
            for (int k = 1; k < p.world; k++)
                some.store(opjit_tile(&p, OPJIT_RING_B, (p.rank + k) % p.world, p.rank, b + done - 1));
            some.store(j.out, own, j.n, j.aligned);
            opjit_send_tiles(&p, OPJIT_RING_B, b + done - 1);
        }
        if (done < 2)
            continue;
        if (!opjit_await_tiles(&p, OPJIT_RING_B, b + done - 2))
            return;
        for (int k = 1; k < p.world; k++) {
            const int r = (p.rank + k) % p.world;
            some.load(opjit_tile(&p, OPJIT_RING_B, p.rank, r, b + done - 2));
            some.store(j.out, (step - 2 * grid) * of_step + r * j.share, j.n, j.aligned);
        }
    }
    opjit_end_tiles(&p, OPJIT_RING_A, a + done - 2);
    opjit_end_tiles(&p, OPJIT_RING_B, b + done - 2);
}

/* The sums of a pack, which each rank has at the same place. */
template <typename element>
static __device__ void sum_pack(const opjit_peers *p, const opjit_ranks_data &data, int64_t i)
{
    typedef opjit_some<element, OPJIT_PACK_BYTES> some;
    opjit_sums<element, OPJIT_PACK_BYTES> sums;
    some x[OPJIT_RANKS];
#pragma unroll
    for (int r = 0; r < OPJIT_RANKS; r++)
        if (r < p->world)
            x[r] = ((const some *)data.of[r])[i];
#pragma unroll
    for (int r = 0; r < OPJIT_RANKS; r++)
        if (r < p->world)
            sums.add(x[r], r == 0);
    x[0] = sums.rounded();
#pragma unroll
    for (int r = 0; r < OPJIT_RANKS; r++)
        if (r < p->world)
            ((some *)data.of[r])[i] = x[0];
}

template <typename element>
static __device__ void sum_element(const opjit_peers *p, const opjit_ranks_data &data, int64_t i)
{
    typename opjit_sum_of<element>::type sum = opjit_number(((const element *)data.of[0])[i]);
#pragma unroll
    for (int r = 1; r < OPJIT_RANKS; r++)
        if (r < p->world)
            sum += opjit_number(((const element *)data.of[r])[i]);
#pragma unroll
    for (int r = 0; r < OPJIT_RANKS; r++)
        if (r < p->world)
            opjit_put((element *)data.of[r] + i, sum);
}

/* The first barrier is for the tensors of the other ranks, and the last one for their sums. */
template <typename element>
static __global__ void __launch_bounds__(THREADS, 2) in_place(const opjit_peers p, const job<element> j)
{
    enum { width = OPJIT_PACK_BYTES / sizeof(element) };
    const int64_t packs = j.n / width, begin = p.rank * j.share, end = opjit_least(begin + j.share, packs);
    OPJIT_BARRIER(&p);
    OPJIT_KERNEL_LOOP(i, end - begin)
        sum_pack<element>(&p, j.ranks, begin + i);
    if (p.rank == p.world - 1 && blockIdx.x == 0 && threadIdx.x < j.n % width)
        sum_element<element>(&p, j.ranks, packs * width + threadIdx.x);
    OPJIT_BARRIER(&p);
}

/* ---------------------------------------------------------------------------------------------- */
/* Launcher                                                                                       */

#ifndef ALL_REDUCE_WAY /* a benchmark sets it */
#define ALL_REDUCE_WAY choose(bytes, p->world)
#endif

static OPJIT_UNUSED enum way choose(int64_t bytes, int world)
{
    if (bytes * (world - 1) <= 1024 * 1024)
        return WORDS;
    return world == 2 ? ONE_SHOT : TWO_SHOTS;
}

template <typename element>
static opjit_status launch(opjit_peers *p, const job<element> *j, void (*kernel)(opjit_peers, job<element>),
                           int64_t blocks, int64_t threads, cudaStream_t stream)
{
    int most;
    OPJIT_TRY(opjit_most_blocks((const void *)kernel, (int)threads, 0, &most));
    blocks = opjit_least(blocks, opjit_least(most, OPJIT_BLOCKS));
    OPJIT_TRY(opjit_peers_launch(p, (const void *)kernel, (int)blocks, (int)threads, 0, stream));
    kernel<<<(unsigned)blocks, (unsigned)threads, 0, stream>>>(*p, *j);
    return OPJIT_LAUNCHED();
}

/* `x` and `out` may be the same. A block gets 128 words, and more if there are more than for all blocks; or a tile. */
template <typename element>
static opjit_status reduce_as(opjit_peers *p, const void *x, void *out, int64_t n, const opjit_ranks_data *tensors,
                              cudaStream_t stream)
{
    const int64_t bytes = n * (int64_t)sizeof(element), words = opjit_parts(bytes, sizeof(opjit_word));
    const enum way way = ALL_REDUCE_WAY;
    job<element> j = {(const element *)x, (element *)out, n, 0, false, {{NULL}}};
    if constexpr (sizeof(element) <= 4) {
        int most;
        OPJIT_TRY(opjit_most_blocks((const void *)sum_words<element>, THREADS, 0, &most));
        const int64_t blocks = opjit_least(most, OPJIT_BLOCKS); /* a small GPU has room for few */
        if (way == WORDS && words <= OPJIT_WORDS_OF_BLOCK * blocks) {
            j.share = opjit_parts(opjit_parts(words, opjit_least(opjit_parts(words, 128), blocks)), 32) * 32;
            j.aligned = opjit_is_aligned(x, 4) && opjit_is_aligned(out, 4);
            return launch(p, &j, sum_words<element>, opjit_parts(words, j.share), opjit_least(j.share, THREADS),
                          stream);
        }
    }
    if (tensors) {
        j.share = opjit_parts(n * (int64_t)sizeof(element) / OPJIT_PACK_BYTES, p->world);
        j.ranks = *tensors;
        return launch(p, &j, in_place<element>, opjit_parts(j.share, THREADS) + 1, THREADS, stream);
    }
    const bool twice = way == TWO_SHOTS;
    const int64_t packs = opjit_parts(bytes, OPJIT_PACK_BYTES * (twice ? p->world : 1));
    const int64_t threads = opjit_tile_threads(packs, p->world), of_tile = threads * OPJIT_PACKS;
    j.share = of_tile * (OPJIT_PACK_BYTES / (int64_t)sizeof(element));
    j.aligned = opjit_is_aligned(x, OPJIT_PACK_BYTES) && opjit_is_aligned(out, OPJIT_PACK_BYTES);
    return launch(p, &j, twice ? two_shots<element> : one_shot<element>, opjit_parts(packs, of_tile), threads, stream);
}

static opjit_status reduce(const opjit_tensor *x, const char *group, void *out, cudaStream_t stream)
{
    opjit_peers peers;
    opjit_tensor packed;
    opjit_ranks_data ranks;
    OPJIT_TRY(opjit_peers_of(&peers, group, 0));
    opjit_agree(&peers, x->numel << 8 | x->dtype);
    const bool reached =
        out == x->data && opjit_is_aligned(out, OPJIT_PACK_BYTES) && opjit_tensors_of(&peers, x, &ranks);
    const opjit_ranks_data *tensors = reached ? &ranks : NULL;
    if (x->numel == 0)
        return OPJIT_OK;
    OPJIT_TRY(opjit_contiguous(&packed, x));
    switch (x->dtype) {
    case OPJIT_FLOAT16: return reduce_as<opjit_half>(&peers, packed.data, out, x->numel, tensors, stream);
    case OPJIT_BFLOAT16: return reduce_as<opjit_bfloat16>(&peers, packed.data, out, x->numel, tensors, stream);
    case OPJIT_FLOAT32: return reduce_as<float>(&peers, packed.data, out, x->numel, tensors, stream);
    case OPJIT_FLOAT64: return reduce_as<double>(&peers, packed.data, out, x->numel, tensors, stream);
    case OPJIT_INT32:
        return reduce_as<uint32_t>(&peers, packed.data, out, x->numel, tensors, stream); /* wraps, as in torch */
    case OPJIT_INT64: return reduce_as<uint64_t>(&peers, packed.data, out, x->numel, tensors, stream);
    default:
        OPJIT_FAIL("takes float16, bfloat16, float32, float64, int32 or int64, not %s", opjit_dtype_name(x->dtype));
    }
}

#ifdef OPJIT_OP_all_reduce_ranks
opjit_status all_reduce_ranks_cuda(const opjit_tensor *x, const char *group, bool sum_gradients, opjit_tensor *out,
                                   cudaStream_t stream)
{
    (void)sum_gradients; /* for the gradient */
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
