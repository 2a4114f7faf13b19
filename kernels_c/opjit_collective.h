/*
 * opjit_collective.h - send elements of any dtype to other ranks and add them, with opjit_messages.h. In a .cu file:
 *
 *     typedef opjit_some<element, 16> some;                      // 16 bytes of elements
 *     some x = opjit_load_some<element, 16>(from, first, n, aligned);
 *     opjit_sums<element, 16> sums;
 *     sums.add(x, true);                                         // the first rank's
 *     sums.add(other, false);
 *     opjit_store_some(to, first, n, aligned, sums.rounded());
 *
 * float16 and bfloat16 are added in float and rounded once, and other types are added in the same type.
 */
#ifndef OPJIT_COLLECTIVE_H
#define OPJIT_COLLECTIVE_H

#include "opjit_messages.h"

/* The number of parts of a size that n elements need. */
OPJIT_HOST_DEVICE int64_t opjit_parts(int64_t n, int64_t size)
{
    return (n + size - 1) / size;
}

OPJIT_HOST_DEVICE int64_t opjit_least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Dtypes that ranks can add. */
OPJIT_UNUSED static bool opjit_is_summable(opjit_dtype dtype)
{
    return opjit_is_floating(dtype) || dtype == OPJIT_INT32 || dtype == OPJIT_INT64;
}

#define OPJIT_SUMMABLE "float16, bfloat16, float32, float64, int32 or int64"

#ifdef __CUDACC__
#include "opjit_pack.h"

/* The type in which elements are added, and the conversions. */
template <typename element>
struct opjit_sum_of {
    typedef element type;
};
template <>
struct opjit_sum_of<opjit_half> {
    typedef float type;
};
template <>
struct opjit_sum_of<opjit_bfloat16> {
    typedef float type;
};

template <typename element>
static __device__ element opjit_number(element x)
{
    return x;
}
static __device__ float opjit_number(opjit_half x)
{
    return opjit_half_to_float(x);
}
static __device__ float opjit_number(opjit_bfloat16 x)
{
    return opjit_bfloat16_to_float(x);
}

template <typename element>
static __device__ void opjit_put(element *to, element x)
{
    *to = x;
}
static __device__ void opjit_put(opjit_half *to, float x)
{
    *to = opjit_float_to_half(x);
}
static __device__ void opjit_put(opjit_bfloat16 *to, float x)
{
    *to = opjit_float_to_bfloat16(x);
}

/* Elements that are sent and added together. */
template <typename element, int bytes>
struct __align__(bytes % 16 == 0 ? 16 : 4) opjit_some {
    enum { width = bytes / sizeof(element) };
    element at[width];
};

/* Elements from `first` on, with zeros after the n-th. `aligned` is true if element 0 is aligned like the struct. */
template <typename element, int bytes>
static __device__ opjit_some<element, bytes> opjit_load_some(const element *x, int64_t first, int64_t n, bool aligned)
{
    typedef opjit_some<element, bytes> some;
    some loaded;
    if (aligned && first + some::width <= n)
        return *(const some *)(x + first);
#pragma unroll
    for (int i = 0; i < some::width; i++)
        loaded.at[i] = first + i < n ? x[first + i] : element();
    return loaded;
}

template <typename element, int bytes>
static __device__ void opjit_store_some(element *to, int64_t first, int64_t n, bool aligned,
                                        const opjit_some<element, bytes> &from)
{
    typedef opjit_some<element, bytes> some;
    if (aligned && first + some::width <= n) {
        *(some *)(to + first) = from;
        return;
    }
#pragma unroll
    for (int i = 0; i < some::width; i++)
        if (first + i < n)
            to[first + i] = from.at[i];
}

/* Sums of elements of all ranks. Every rank adds them in the order of the ranks, so all ranks get the same bits. */
template <typename element, int bytes>
struct opjit_sums {
    typedef opjit_some<element, bytes> some;
    typename opjit_sum_of<element>::type at[some::width];

    __device__ void add(const some &x, bool first)
    {
#pragma unroll
        for (int i = 0; i < some::width; i++)
            at[i] = first ? opjit_number(x.at[i]) : at[i] + opjit_number(x.at[i]);
    }

    __device__ some rounded() const
    {
        some result;
#pragma unroll
        for (int i = 0; i < some::width; i++)
            opjit_put(&result.at[i], at[i]);
        return result;
    }
};

/* The packs of a tile that a thread sends or adds. Neighboring threads have neighboring packs. They are kept as words,
 * because each 16-bit element would take a register. */
enum { OPJIT_PACKS = 4 };

template <typename element>
struct opjit_packs {
    typedef opjit_some<element, OPJIT_PACK_BYTES> some;
    uint4 at[OPJIT_PACKS];

    /* The place of a pack in a tile, in packs. */
    static __device__ int place(int k) { return (int)(k * blockDim.x + threadIdx.x); }

    /* Whether a pack can be loaded and stored at once. */
    static __device__ bool is_whole(int k, int64_t first, int64_t n, bool aligned)
    {
        return aligned && first + (place(k) + 1) * some::width <= n;
    }

    /* From or to the tile of a tensor that begins with the element `first`, with zeros after the n-th element. */
    __device__ void load(const element *x, int64_t first, int64_t n, bool aligned)
    {
#pragma unroll
        for (int k = 0; k < OPJIT_PACKS; k++)
            if (is_whole(k, first, n, aligned))
                at[k] = *(const uint4 *)(x + first + place(k) * some::width);
            else
                keep(k, opjit_load_some<element, OPJIT_PACK_BYTES>(x, first + place(k) * some::width, n, false));
    }

    __device__ void store(element *to, int64_t first, int64_t n, bool aligned) const
    {
#pragma unroll
        for (int k = 0; k < OPJIT_PACKS; k++)
            if (is_whole(k, first, n, aligned))
                *(uint4 *)(to + first + place(k) * some::width) = at[k];
            else
                opjit_store_some(to, first + place(k) * some::width, n, false, elements(at[k]));
    }

    /* From or to a tile of an inbox. */
    __device__ void load(const void *tile)
    {
#pragma unroll
        for (int k = 0; k < OPJIT_PACKS; k++)
            at[k] = ((const uint4 *)tile)[place(k)];
    }

    __device__ void store(void *tile) const
    {
#pragma unroll
        for (int k = 0; k < OPJIT_PACKS; k++)
            ((uint4 *)tile)[place(k)] = at[k];
    }

    /* These are the elements of this rank. Add the tiles of the other ranks to them. */
    __device__ void add(const opjit_peers *p, uint32_t count)
    {
#pragma unroll
        for (int k = 0; k < OPJIT_PACKS; k += 2) /* the sums of more packs do not fit into the registers */
            add_two(p, count, k);
    }

    __device__ void add_two(const opjit_peers *p, uint32_t count, int k)
    {
        opjit_sums<element, OPJIT_PACK_BYTES> sums[2];
        for (int r = 0; r < p->world; r++) {
            uint4 x[2] = {at[k], at[k + 1]};
            if (r != p->rank) {
                const uint4 *tile = (const uint4 *)opjit_tile(p, OPJIT_RING_A, p->rank, r, count);
                x[0] = tile[place(k)];
                x[1] = tile[place(k + 1)];
            }
            sums[0].add(elements(x[0]), r == 0);
            sums[1].add(elements(x[1]), r == 0);
        }
        keep(k, sums[0].rounded());
        keep(k + 1, sums[1].rounded());
    }

    __device__ void keep(int k, const some &x) { memcpy(&at[k], &x, sizeof x); }

    static __device__ some elements(uint4 words)
    {
        some x;
        memcpy(&x, &words, sizeof x);
        return x;
    }
};

/* The number of threads of a block, of which each has OPJIT_PACKS packs of a tile. */
OPJIT_UNUSED static int64_t opjit_tile_threads(int64_t packs, int world)
{
    const int64_t most = opjit_tile_bytes(world) / (OPJIT_PACK_BYTES * OPJIT_PACKS);
    return opjit_least(opjit_parts(packs, OPJIT_BLOCKS * OPJIT_PACKS * 32) * 32, most);
}

/* Get a word from each rank. It looks for all words before it waits for one, so that the loads overlap. */
static __device__ __forceinline__ bool opjit_pull_all(const opjit_peers *p, uint32_t count, int i,
                                                      opjit_word (&words)[OPJIT_RANKS])
{
    bool here[OPJIT_RANKS], came = true;
#pragma unroll
    for (int r = 0; r < OPJIT_RANKS; r++)
        here[r] = r >= p->world || r == p->rank || opjit_peek(p, r, count, i, &words[r]);
#pragma unroll
    for (int r = 0; r < OPJIT_RANKS; r++)
        if (!here[r])
            came = came && opjit_pull(p, r, count, i, &words[r]);
    return came;
}

static __device__ void opjit_push_all(const opjit_peers *p, uint32_t count, int i, opjit_word word)
{
    for (int r = 0; r < p->world; r++)
        if (r != p->rank)
            opjit_push(p, r, count, i, word);
}

#else

/*
 * On the CPU, a piece of a tensor goes through the buffers of the ranks. The first and the second third of a buffer
 * alternate for inputs, and the last third is for results. A third is written again only after a barrier, which ranks
 * reach when they have read it. Return the offset of the next piece, in bytes.
 */
OPJIT_UNUSED static int64_t opjit_third(const opjit_peers *p)
{
    return p->bytes / 3 & ~(int64_t)63;
}

OPJIT_UNUSED static int64_t opjit_turn(const opjit_peers *p)
{
    return (*opjit_count_at(p, 0, OPJIT_BARRIERS) & 1) * opjit_third(p);
}

/* Add the elements from `begin` to `end` of all ranks. They start `offset` bytes into the buffers. */
#define OPJIT_ADD_RANKS(type_, sum_, load_, store_) \
    for (int64_t i = begin; i < end; i += 512) { \
        const int64_t n = opjit_least(end - i, 512); \
        sum_ sums[512]; \
        for (int r = 0; r < p->world; r++) { \
            const type_ *from = (const type_ *)((const char *)p->buffer[r] + offset) + i; \
            for (int64_t k = 0; k < n; k++) \
                sums[k] = r == 0 ? load_(from[k]) : sums[k] + load_(from[k]); \
        } \
        type_ *result = (type_ *)to + (i - begin); \
        for (int64_t k = 0; k < n; k++) \
            result[k] = store_(sums[k]); \
    } \
    break

OPJIT_UNUSED static void opjit_add_ranks(const opjit_peers *p, opjit_dtype dtype, int64_t offset, int64_t begin,
                                         int64_t end, void *to)
{
    switch (dtype) {
    case OPJIT_FLOAT16: OPJIT_ADD_RANKS(opjit_half, float, opjit_half_to_float, opjit_float_to_half);
    case OPJIT_BFLOAT16: OPJIT_ADD_RANKS(opjit_bfloat16, float, opjit_bfloat16_to_float, opjit_float_to_bfloat16);
    case OPJIT_FLOAT32: OPJIT_ADD_RANKS(float, float, , );
    case OPJIT_FLOAT64: OPJIT_ADD_RANKS(double, double, , );
    case OPJIT_INT32: OPJIT_ADD_RANKS(uint32_t, uint32_t, , ); /* wraps around, like in torch */
    default: OPJIT_ADD_RANKS(uint64_t, uint64_t, , );
    }
}
#endif

#endif
