/*
 * all_reduce_ranks on the CPU: the elementwise sum of the ranks' tensors, over shared memory.
 *
 * A tensor goes through the ranks' buffers in pieces. Of a small piece, every rank adds all ranks' parts. Of a large one,
 * each rank adds a share and all copy the shares, which moves less memory. Elements are added in the order of the ranks,
 * float16 and bfloat16 in float32, so all ranks have the same bits.
 *
 * A buffer has two halves for what a rank gives, used in turn, and room for its share of the sum. A half is written again
 * after a barrier that ranks reach when they have read it.
 */
#include "opjit_peers.h"

#define SMALL (32 * 1024) /* bytes */
#define AT_ONCE 512       /* elements that are added in a row */

/* Add elements `begin` to `end` of all ranks' parts, which lie `offset` bytes into their buffers. */
#define ADD(type_, sum_, load_, store_) \
    do { \
        const int64_t n = end - i < AT_ONCE ? end - i : AT_ONCE; \
        sum_ sums[AT_ONCE]; \
        for (int r = 0; r < p->world; r++) { \
            const type_ *from = (const type_ *)((const char *)p->buffer[r] + offset) + i; \
            for (int64_t k = 0; k < n; k++) \
                sums[k] = r == 0 ? load_(from[k]) : sums[k] + load_(from[k]); \
        } \
        type_ *result = (type_ *)to + (i - begin); \
        for (int64_t k = 0; k < n; k++) \
            result[k] = store_(sums[k]); \
    } while (0)

static void add(const opjit_peers *p, opjit_dtype dtype, int64_t offset, int64_t begin, int64_t end, void *to)
{
    for (int64_t i = begin; i < end; i += AT_ONCE)
        switch (dtype) {
        case OPJIT_FLOAT16: ADD(opjit_half, float, opjit_half_to_float, opjit_float_to_half); break;
        case OPJIT_BFLOAT16: ADD(opjit_bfloat16, float, opjit_bfloat16_to_float, opjit_float_to_bfloat16); break;
        case OPJIT_FLOAT32: ADD(float, float, , ); break;
        case OPJIT_FLOAT64: ADD(double, double, , ); break;
        case OPJIT_INT32: ADD(uint32_t, uint32_t, , ); break; /* wraps around, as in torch */
        default: ADD(uint64_t, uint64_t, , ); break;
        }
}

/* The sum of a piece of n elements. */
static opjit_status reduce(const opjit_peers *p, opjit_dtype dtype, int64_t n, const void *from, char *to)
{
    const int64_t size = (int64_t)opjit_dtype_size(dtype), room = p->bytes / 3 & ~(int64_t)63;
    const int64_t offset = (*opjit_count_at(p, 0, OPJIT_BARRIERS) & 1) * room;
    memcpy((char *)p->buffer[p->rank] + offset, from, (size_t)(n * size));
    OPJIT_BARRIER(p);
    if (n * size <= SMALL) {
        add(p, dtype, offset, 0, n, to);
        return OPJIT_OK;
    }
    const int64_t share = (n + p->world - 1) / p->world;
    for (int step = 0; step < 2; step++) {
        for (int r = 0; r < p->world; r++) {
            const int64_t begin = r * share < n ? r * share : n, end = begin + share < n ? begin + share : n;
            char *sums = (char *)p->buffer[r] + 2 * room;
            if (step == 0 && r == p->rank)
                add(p, dtype, offset, begin, end, sums);
            if (step == 1)
                memcpy(to + begin * size, sums, (size_t)((end - begin) * size));
        }
        if (step == 0)
            OPJIT_BARRIER(p);
    }
    return OPJIT_OK;
}

static opjit_status all_reduce(const opjit_tensor *x, const char *group, void *to)
{
    opjit_peers peers;
    opjit_tensor packed;
    const int64_t size = (int64_t)opjit_dtype_size(x->dtype);
    OPJIT_CHECK((opjit_is_floating(x->dtype) || x->dtype == OPJIT_INT32 || x->dtype == OPJIT_INT64),
                "takes float16, bfloat16, float32, float64, int32 or int64, not %s", opjit_dtype_name(x->dtype));
    OPJIT_TRY(opjit_peers_of(&peers, group, 3 * 64 * size));
    OPJIT_TRY(opjit_contiguous(&packed, x));
    opjit_agree(&peers, x->numel);
    const int64_t most = (peers.bytes / 3 & ~(int64_t)63) / size;
    for (int64_t done = 0; done < x->numel; done += most) {
        const int64_t n = x->numel - done < most ? x->numel - done : most;
        OPJIT_TRY(reduce(&peers, x->dtype, n, (const char *)packed.data + done * size, (char *)to + done * size));
    }
    return OPJIT_OK;
}

#ifdef OPJIT_OP_all_reduce_ranks
opjit_status all_reduce_ranks_cpu(const opjit_tensor *x, const char *group, opjit_tensor *out)
{
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
