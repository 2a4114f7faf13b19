/*
 * all_gather_ranks, all_to_all_ranks and reduce_scatter_ranks on CUDA, through the tiles of opjit_messages.h.
 *
 * A chunk is the data that a rank sends to another rank: all of x for all_gather_ranks, otherwise the other rank's
 * share of x. A block sends a tile of each chunk and, while these are on their way, stores or adds the tiles that it
 * got in the step before.
 */
#include "opjit_collective.h"

#define THREADS 512

#if defined OPJIT_OP_all_gather_ranks
#define FUNCTION all_gather_ranks_cuda
enum { GATHERS = 1, ADDS = 0 };
#elif defined OPJIT_OP_all_to_all_ranks
#define FUNCTION all_to_all_ranks_cuda
enum { GATHERS = 0, ADDS = 0 };
#else
#define FUNCTION reduce_scatter_ranks_cuda
enum { GATHERS = 0, ADDS = 1 };
#endif

template <typename element>
static __global__ void __launch_bounds__(THREADS, 2)
    exchange(const opjit_peers p, const element *x, element *out, int64_t chunk, bool aligned)
{
    const int64_t tile = blockDim.x * (int64_t)(OPJIT_PACKS * opjit_packs<element>::some::width);
    const int64_t tiles = opjit_parts(chunk, tile), step = gridDim.x;
    const element *own = x + (GATHERS ? 0 : p.rank * chunk);
    const uint32_t begin = opjit_begin_tiles(&p, OPJIT_RING_A);
    uint32_t count = begin;
    opjit_packs<element> some;
    for (int64_t t = blockIdx.x; t - step < tiles; t += step, count++) {
        for (int r = 0; r < p.world && t < tiles; r++) {
            if (r == p.rank)
                continue;
            some.load(x + (GATHERS ? 0 : r * chunk), t * tile, chunk, aligned);
            some.store(opjit_tile(&p, OPJIT_RING_A, r, p.rank, count));
        }
        if (t < tiles)
            opjit_send_tiles(&p, OPJIT_RING_A, count);
        if (count == begin)
            continue;
        const int64_t first = (t - step) * tile;
        some.load(own, first, chunk, aligned);
        if (!ADDS)
            some.store(out + p.rank * chunk, first, chunk, aligned);
        if (!opjit_await_tiles(&p, OPJIT_RING_A, count - 1))
            return;
        if (ADDS) {
            some.add(&p, count - 1);
            some.store(out, first, chunk, aligned);
        } else {
            for (int r = 0; r < p.world; r++) {
                if (r == p.rank)
                    continue;
                some.load(opjit_tile(&p, OPJIT_RING_A, p.rank, r, count - 1));
                some.store(out + r * chunk, first, chunk, aligned);
            }
        }
    }
    opjit_end_tiles(&p, OPJIT_RING_A, count - 1);
}

template <typename element>
static opjit_status launch(opjit_peers *p, const void *x, void *out, int64_t bytes, cudaStream_t stream)
{
    const bool aligned = opjit_is_aligned(x, 16) && opjit_is_aligned(out, 16) && bytes % 16 == 0;
    const int64_t packs = opjit_parts(bytes, OPJIT_PACK_BYTES);
    const int threads = (int)opjit_tile_threads(packs, p->world);
    int most;
    OPJIT_TRY(opjit_most_blocks((const void *)exchange<element>, threads, 0, &most));
    const int blocks = (int)opjit_least(opjit_parts(packs, threads * OPJIT_PACKS), opjit_least(most, OPJIT_BLOCKS));
    OPJIT_TRY(opjit_peers_launch(p, (const void *)exchange<element>, blocks, threads, 0, stream));
    exchange<<<blocks, threads, 0, stream>>>(*p, (const element *)x, (element *)out, bytes / (int64_t)sizeof(element),
                                             aligned);
    return OPJIT_LAUNCHED();
}

opjit_status FUNCTION(const opjit_tensor *x, const char *group, opjit_tensor *out, cudaStream_t stream)
{
    opjit_peers p;
    opjit_tensor packed;
    int64_t sizes[OPJIT_MAX_DIM];
    OPJIT_CHECK(x->dim > 0 && x->dtype != OPJIT_OTHER_DTYPE, "takes a tensor of a known dtype with a first dimension");
    OPJIT_CHECK(!ADDS || opjit_is_summable(x->dtype), "takes " OPJIT_SUMMABLE ", not %s", opjit_dtype_name(x->dtype));
    OPJIT_TRY(opjit_peers_of(&p, group, 0));
    OPJIT_CHECK(GATHERS || x->sizes[0] % p.world == 0, "the first size is %lld, which %d ranks cannot share",
                (long long)x->sizes[0], p.world);
    memcpy(sizes, x->sizes, (size_t)x->dim * sizeof *sizes);
    sizes[0] = GATHERS ? sizes[0] * p.world : ADDS ? sizes[0] / p.world : sizes[0];
    OPJIT_TRY(opjit_empty(out, x->dim, sizes, x->dtype, x));
    if (x->numel == 0)
        return OPJIT_OK;
    OPJIT_TRY(opjit_contiguous(&packed, x));
    opjit_agree(&p, x->numel << 8 | x->dtype);
    const int64_t bytes = x->numel * (int64_t)opjit_dtype_size(x->dtype) / (GATHERS ? 1 : p.world);
    if (!ADDS && bytes % 4 == 0 && opjit_is_aligned(packed.data, 4))
        return launch<uint32_t>(&p, packed.data, out->data, bytes, stream);
    if (!ADDS)
        return launch<uint8_t>(&p, packed.data, out->data, bytes, stream);
    switch (x->dtype) {
    case OPJIT_FLOAT16: return launch<opjit_half>(&p, packed.data, out->data, bytes, stream);
    case OPJIT_BFLOAT16: return launch<opjit_bfloat16>(&p, packed.data, out->data, bytes, stream);
    case OPJIT_FLOAT32: return launch<float>(&p, packed.data, out->data, bytes, stream);
    case OPJIT_FLOAT64: return launch<double>(&p, packed.data, out->data, bytes, stream);
    case OPJIT_INT32: return launch<uint32_t>(&p, packed.data, out->data, bytes, stream);
    default: return launch<uint64_t>(&p, packed.data, out->data, bytes, stream);
    }
}
