/*
 * all_gather_ranks, all_to_all_ranks and reduce_scatter_ranks on the CPU, over shared memory.
 *
 * A chunk is the data that a rank sends to another rank: all of x for all_gather_ranks, otherwise the other rank's
 * share of x. Pieces of chunks go through the ranks' buffers: a rank writes a piece for each reader, and after the
 * barrier reads the pieces that are for this rank.
 */
#include "opjit_collective.h"

#if defined OPJIT_OP_all_gather_ranks
#define FUNCTION all_gather_ranks_cpu
enum { GATHERS = 1, ADDS = 0 };
#elif defined OPJIT_OP_all_to_all_ranks
#define FUNCTION all_to_all_ranks_cpu
enum { GATHERS = 0, ADDS = 0 };
#else
#define FUNCTION reduce_scatter_ranks_cpu
enum { GATHERS = 0, ADDS = 1 };
#endif

opjit_status FUNCTION(const opjit_tensor *x, const char *group, opjit_tensor *out)
{
    opjit_peers p;
    opjit_tensor packed;
    int64_t sizes[OPJIT_MAX_DIM];
    const int64_t size = (int64_t)opjit_dtype_size(x->dtype);
    OPJIT_CHECK(x->dim > 0 && size > 0, "takes a tensor of a known dtype with a first dimension");
    OPJIT_CHECK(!ADDS || opjit_is_summable(x->dtype), "takes " OPJIT_SUMMABLE ", not %s", opjit_dtype_name(x->dtype));
    OPJIT_TRY(opjit_peers_of(&p, group, 3 * OPJIT_RANKS * 64 * size));
    OPJIT_CHECK(GATHERS || x->sizes[0] % p.world == 0, "the first size is %lld, which %d ranks cannot share",
                (long long)x->sizes[0], p.world);
    memcpy(sizes, x->sizes, (size_t)x->dim * sizeof *sizes);
    sizes[0] = GATHERS ? sizes[0] * p.world : ADDS ? sizes[0] / p.world : sizes[0];
    OPJIT_TRY(opjit_empty(out, x->dim, sizes, x->dtype, x));
    OPJIT_TRY(opjit_contiguous(&packed, x));
    opjit_agree(&p, x->numel << 8 | x->dtype);
    const int readers = GATHERS ? 1 : p.world;
    const int64_t chunk = x->numel / readers, most = opjit_third(&p) / readers / size;
    for (int64_t done = 0; done < chunk; done += most) {
        const int64_t n = opjit_least(chunk - done, most), turn = opjit_turn(&p);
        const int64_t mine = turn + (GATHERS ? 0 : p.rank * n * size);
        for (int r = 0; r < readers; r++)
            memcpy((char *)p.buffer[p.rank] + turn + r * n * size, (char *)packed.data + (r * chunk + done) * size,
                   (size_t)(n * size));
        OPJIT_BARRIER(&p);
        if (ADDS)
            opjit_add_ranks(&p, x->dtype, mine, 0, n, (char *)out->data + done * size);
        for (int r = 0; r < p.world && !ADDS; r++)
            memcpy((char *)out->data + (r * chunk + done) * size, (char *)p.buffer[r] + mine, (size_t)(n * size));
    }
    return OPJIT_OK;
}
