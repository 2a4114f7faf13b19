/*
 * allreduce on the CPU: the sum of all elements, with torch.sum's dtype rules.
 *
 * The elements, in memory order, are divided into chunks with a length that depends only on their number. Threads sum
 * chunks, and the totals are added in order, so the result does not depend on the number of threads. Long rows are
 * added in place (lanes.h). Short or strided rows, and elements that torch.sum would convert first, are collected in a
 * buffer that stays in the L1 cache.
 *
 * Large sums run at the speed of memory: tests/benchmarks/floors.py and `opjit bench allreduce` show it.
 */
#include "opjit_convert.h"
#include "opjit_elementwise.h"

#include "allreduce.h"
#include "lanes.h"

#define CHUNKS 512               /* at most */
#define CHUNK_BYTES (128 * 1024) /* at least, of the input */
#define CHUNKS_PER_THREAD 3      /* fewer are not worth a thread */
#define PIECE 1024               /* elements */

/* The whole sum. */
typedef struct sum {
    opjit_elements elements;
    opjit_dtype from, as; /* the elements' dtype, and the one to convert them to before they are added */
    bool as_double;
    int64_t from_size, as_size; /* bytes of an element */
    int64_t chunk;              /* elements */
    total totals[CHUNKS];
} sum;

/* One chunk of it. */
typedef struct chunk {
    const sum *sum;
    total total;
    int64_t collected; /* elements in `piece` */
    double piece[PIECE];
} chunk;

static void add_piece(chunk *c)
{
    add_elements(c->piece, c->sum->as, c->sum->as_double, c->collected, &c->total);
    c->collected = 0;
}

/* Add n elements that are strides[0] elements apart. */
static void add_row(int64_t n, void *const *data, const int64_t *strides, const void *context)
{
    chunk *c = *(chunk *const *)context;
    const sum *s = c->sum;
    const char *from = (const char *)data[0];
    if (s->from == s->as && strides[0] == 1 && n >= PIECE / 2) {
        add_elements(from, s->from, s->as_double, n, &c->total);
        return;
    }
    while (n > 0) {
        const int64_t room = PIECE - c->collected, part = n < room ? n : room;
        opjit_convert(part, from, s->from, strides[0], (char *)c->piece + c->collected * s->as_size, s->as);
        c->collected += part;
        from += part * strides[0] * s->from_size;
        n -= part;
        if (c->collected == PIECE)
            add_piece(c);
    }
}

static opjit_status add_chunks(int64_t begin, int64_t end, void *context)
{
    sum *s = (sum *)context;
    chunk c, *const current = &c;
    c.sum = s;
    for (int64_t i = begin; i < end; i++) {
        const int64_t first = i * s->chunk, last = first + s->chunk, numel = s->elements.numel;
        c.total = (total){0, 0, 0};
        c.collected = 0;
        opjit_rows_between(&s->elements, first, last < numel ? last : numel, add_row, &current);
        if (c.collected > 0)
            add_piece(&c);
        s->totals[i] = c.total;
    }
    return OPJIT_OK;
}

static opjit_status add_all(sum *s, total *to)
{
    const int64_t numel = s->elements.numel, least = CHUNK_BYTES / s->from_size;
    s->chunk = (numel / CHUNKS + least) / least * least;
    const int64_t chunks = (numel + s->chunk - 1) / s->chunk;
    OPJIT_TRY(opjit_parallel_for(0, chunks, CHUNKS_PER_THREAD, add_chunks, s));
    for (int64_t i = 0; i < chunks; i++)
        add_total(&s->totals[i], to);
    return OPJIT_OK;
}

/* The result: `repeats` times the total. */
static void store(const total *t, bool integral, int64_t repeats, opjit_tensor *out)
{
    const uint64_t integer = t->integer * (uint64_t)repeats;
    const bool finite = t->rest - t->rest == 0; /* after infinity or NaN the rest means nothing */
    double real = integral ? (double)(int64_t)t->integer : finite ? t->sum + t->rest : t->sum;
    real *= (double)repeats;
    if (opjit_is_integral(out->dtype))
        opjit_convert(1, &integer, OPJIT_INT64, 1, out->data, out->dtype);
    else
        opjit_convert(1, &real, OPJIT_FLOAT64, 1, out->data, out->dtype);
}

opjit_status allreduce_cpu(const opjit_tensor *x, const opjit_dtype *dtype, opjit_tensor *out)
{
    int64_t sizes[OPJIT_MAX_DIM];
    opjit_tensor view;
    opjit_dtype result;
    total all = {0, 0, 0};
    sum s;
    OPJIT_TRY(result_dtype(x, dtype, &result));
    OPJIT_TRY(opjit_empty(out, 0, NULL, result, x));
    const int64_t repeats = without_repeats(x, sizes, &view);
    s.from = x->dtype;
    s.as_double = s.from == OPJIT_FLOAT32 && result == OPJIT_FLOAT64;
    s.as = s.as_double || converts_the_sum(s.from, result, x->numel) ? s.from : result;
    s.from_size = (int64_t)opjit_dtype_size(s.from);
    s.as_size = (int64_t)opjit_dtype_size(s.as);
    OPJIT_TRY(opjit_elements_of(&s.elements, 1, (const opjit_tensor *[]){&view}));
    OPJIT_TRY(add_all(&s, &all));
    store(&all, opjit_is_integral(s.as), repeats, out);
    return OPJIT_OK;
}
