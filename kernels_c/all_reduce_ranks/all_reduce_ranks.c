/*
 * all_reduce_ranks on the CPU: the elementwise sum of the ranks' tensors, over shared memory.
 *
 * A tensor goes through the ranks' buffers in pieces. Of a small piece, every rank adds all ranks' parts. Of a large one,
 * each rank adds a share and all copy the shares, which moves less memory. Elements are added in the order of the ranks,
 * float16 and bfloat16 in float32, so all ranks have the same bits.
 */
#include "opjit_collective.h"

#define SMALL (32 * 1024) /* bytes */

static opjit_status reduce(const opjit_peers *p, opjit_dtype dtype, int64_t n, const void *from, char *to)
{
    const int64_t size = (int64_t)opjit_dtype_size(dtype), share = opjit_parts(n, p->world), turn = opjit_turn(p);
    memcpy((char *)p->buffer[p->rank] + turn, from, (size_t)(n * size));
    OPJIT_BARRIER(p);
    if (n * size <= SMALL) {
        opjit_add_ranks(p, dtype, turn, 0, n, to);
        return OPJIT_OK;
    }
    const int64_t own = opjit_least(p->rank * share, n);
    opjit_add_ranks(p, dtype, turn, own, opjit_least(own + share, n), (char *)p->buffer[p->rank] + 2 * opjit_third(p));
    OPJIT_BARRIER(p);
    for (int r = 0; r < p->world; r++) {
        const int64_t begin = opjit_least(r * share, n), end = opjit_least(begin + share, n);
        memcpy(to + begin * size, (char *)p->buffer[r] + 2 * opjit_third(p), (size_t)((end - begin) * size));
    }
    return OPJIT_OK;
}

static opjit_status all_reduce(const opjit_tensor *x, const char *group, void *to)
{
    opjit_peers peers;
    opjit_tensor packed;
    const int64_t size = (int64_t)opjit_dtype_size(x->dtype);
    OPJIT_CHECK(opjit_is_summable(x->dtype), "takes " OPJIT_SUMMABLE ", not %s", opjit_dtype_name(x->dtype));
    OPJIT_TRY(opjit_peers_of(&peers, group, 3 * 64 * size));
    OPJIT_TRY(opjit_contiguous(&packed, x));
    opjit_agree(&peers, x->numel << 8 | x->dtype);
    const int64_t most = opjit_third(&peers) / size;
    for (int64_t done = 0; done < x->numel; done += most)
        OPJIT_TRY(reduce(&peers, x->dtype, opjit_least(x->numel - done, most), (const char *)packed.data + done * size,
                         (char *)to + done * size));
    return OPJIT_OK;
}

#ifdef OPJIT_OP_all_reduce_ranks
opjit_status all_reduce_ranks_cpu(const opjit_tensor *x, const char *group, bool sum_gradients, opjit_tensor *out)
{
    (void)sum_gradients; /* for the gradient */
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    return all_reduce(x, group, out->data);
}
#else
opjit_status all_reduce_ranks__cpu(opjit_tensor *x, const char *group)
{
    const size_t size = opjit_dtype_size(x->dtype);
    void *sums;
    if (x->contiguous)
        return all_reduce(x, group, x->data);
    OPJIT_TRY(opjit_scratch(&sums, x->numel * (int64_t)size, x));
    OPJIT_TRY(all_reduce(x, group, sums));
    OPJIT_FOR_EACH(i, at, x)
        memcpy((char *)x->data + at * (int64_t)size, (char *)sums + i * (int64_t)size, size);
    return OPJIT_OK;
}
#endif
