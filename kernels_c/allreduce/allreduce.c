/*
 * allreduce on the CPU: the sum of all elements, with torch.sum's dtype rules.
 *
 * The elements, in memory order, are divided into chunks with a length that depends only on their number. Threads sum
 * chunks, and the totals are added in order, so the result does not depend on the number of threads. Adjacent elements
 * and most strided elements are added in place (lanes.h). The others, and those that torch.sum would convert first, are
 * collected in a buffer that stays in the L1 cache. If rows are very short, their columns are added instead.
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
#define PIECE 512                /* elements */
#define COLUMNS 16               /* at most */
#define ROWS 64                  /* that are added together, at least */
#define NEAR 16384               /* bytes that are still in the L1 cache when they are read again */
#define ROW_BYTES 16384          /* of a row that is not divided between chunks, at most */

/*
 * The whole sum. `positions` are the elements without their innermost dimensions, and each has a row of elements, or
 * elements at a few offsets, which are columns of the rows.
 */
typedef struct sum {
    opjit_elements positions;
    int64_t each; /* elements of a position */
    int64_t columns, offsets[COLUMNS];
    int64_t row, row_stride;
    opjit_dtype from, as; /* the elements' dtype, and the one to convert them to before they are added */
    form form;
    int64_t from_size, as_size; /* bytes of an element */
    int64_t chunk;              /* positions */
    total totals[CHUNKS];
} sum;

/* One chunk of it. */
typedef struct chunk {
    const sum *sum;
    lanes lanes;
    int64_t collected; /* elements in `piece` */
    double piece[PIECE];
} chunk;

/* Add the collected elements, of which the last vector is filled up with elements that add nothing. */
static void add_piece(chunk *c)
{
    const sum *s = c->sum;
    const int64_t width = VECTOR / s->as_size, vectors = (c->collected + width - 1) / width;
    char *end = (char *)c->piece + c->collected * s->as_size;
    opjit_convert(vectors * width - c->collected, &s->form.flip, s->as, 0, end, s->as);
    add_vectors(&s->form, (const char *)c->piece, vectors, 1, 0, &c->lanes);
    c->collected = 0;
}

/* Elements that are `stride` elements apart: collect them in the buffer. */
static void collect(chunk *c, int64_t n, const char *from, int64_t stride)
{
    const sum *s = c->sum;
    while (n > 0) {
        const int64_t room = PIECE - c->collected, part = n < room ? n : room;
        char *to = (char *)c->piece + c->collected * s->as_size;
        if (s->from == s->as && stride == 1)
            memcpy(to, from, (size_t)(part * s->from_size));
        else
            opjit_convert(part, from, s->from, stride, to, s->as);
        c->collected += part;
        from += part * stride * s->from_size;
        n -= part;
        if (c->collected == PIECE)
            add_piece(c);
    }
}

/*
 * Add rows of n elements that are `stride` elements apart. The rows are `apart` elements apart. Vectors are added in
 * place, and the last few elements of each row are added as columns or collected.
 */
static void add_rows(chunk *c, int64_t n, int64_t stride, int64_t rows, int64_t apart, const char *from)
{
    const sum *s = c->sum;
    const int64_t bytes = apart * s->from_size;
    int64_t done = 0;
    if (s->from == s->as && stride == 1) {
        const int64_t vectors = n * s->from_size / VECTOR;
        add_vectors(&s->form, from, vectors, rows, bytes, &c->lanes);
        done = vectors * VECTOR / s->from_size;
    } else if (s->from == s->as && s->form.scattered) {
        add_scattered(&s->form, from, n, stride, rows, bytes, &c->lanes);
        return;
    }
    from += done * stride * s->from_size;
    if (done > 0 && rows > 1 && rows * bytes <= NEAR) /* the last few are columns of short rows */
        for (int64_t k = done; k < n; k++, from += stride * s->from_size)
            add_rows(c, rows, apart, 1, 0, from);
    else if (done < n)
        for (int64_t i = 0; i < rows; i++, from += bytes)
            collect(c, n - done, from, stride);
}

/* Add the elements of n positions. */
static void add_positions(int64_t n, void *const *data, const int64_t *strides, const void *context)
{
    chunk *c = *(chunk *const *)context;
    const sum *s = c->sum;
    const int64_t bytes = strides[0] * s->from_size; /* not 0: without_repeats() */
    const int64_t several = ROWS * bytes < NEAR ? NEAR / bytes : ROWS, block = s->each > 1 ? several : n;
    for (int64_t i = 0; i < n; i += block) {
        const int64_t some = n - i < block ? n - i : block;
        const char *from = (const char *)data[0] + i * strides[0] * s->from_size;
        if (s->row > 1)
            add_rows(c, s->row, s->row_stride, some, strides[0], from);
        for (int64_t k = 0; k < s->columns; k++)
            add_rows(c, some, strides[0], 1, 0, from + s->offsets[k] * s->from_size);
    }
}

static opjit_status add_chunks(int64_t begin, int64_t end, void *context)
{
    sum *s = (sum *)context;
    chunk c, *const current = &c;
    c.sum = s;
    for (int64_t i = begin; i < end; i++) {
        const int64_t first = i * s->chunk, numel = s->positions.numel;
        const int64_t last = first + s->chunk < numel ? first + s->chunk : numel;
        c.lanes = (lanes){{0}, {0}, {0}};
        c.collected = 0;
        opjit_rows_between(&s->positions, first, last, add_positions, &current);
        if (c.collected > 0)
            add_piece(&c);
        s->totals[i] = total_of(&s->form, &c.lanes, (last - first) * s->each);
    }
    return OPJIT_OK;
}

static opjit_status add_all(sum *s, total *to)
{
    const int64_t numel = s->positions.numel, most = CHUNK_BYTES / (s->from_size * s->each);
    const int64_t least = most > 0 ? most : 1;
    s->chunk = (numel / CHUNKS + least) / least * least;
    const int64_t chunks = (numel + s->chunk - 1) / s->chunk;
    OPJIT_TRY(opjit_parallel_for(0, chunks, CHUNKS_PER_THREAD, add_chunks, s));
    for (int64_t i = 0; i < chunks; i++)
        add_total(&s->totals[i], to);
    return OPJIT_OK;
}

/*
 * How many of the innermost dimensions become columns: as many as fit, if more rows follow each other than columns. A
 * row of some vectors is not divided.
 */
static int64_t dimensions_of_columns(const sum *s)
{
    const opjit_elements *e = &s->positions;
    const int64_t inner = e->dim - 1;
    const bool in_place = s->from == s->as && e->strides[inner][0] == 1;
    int64_t columns = 1, found = 0;
    if (in_place && e->sizes[inner] * s->from_size >= 2 * VECTOR)
        return 0;
    for (int64_t d = inner; d > 0 && columns * e->sizes[d] <= COLUMNS; d--) {
        columns *= e->sizes[d];
        if (e->sizes[d - 1] >= columns)
            found = e->dim - d;
    }
    return found;
}

/* Take the innermost dimension out of the positions. */
static int64_t take_dimension(opjit_elements *e, int64_t *stride)
{
    const int64_t inner = --e->dim;
    e->numel /= e->sizes[inner];
    *stride = e->strides[inner][0];
    return e->sizes[inner];
}

static void arrange(sum *s)
{
    opjit_elements *e = &s->positions;
    s->columns = 1;
    s->offsets[0] = 0;
    s->row = 1;
    for (int64_t left = dimensions_of_columns(s); left > 0; left--) {
        int64_t stride;
        const int64_t size = take_dimension(e, &stride);
        for (int64_t i = size - 1; i >= 0; i--)
            for (int64_t k = 0; k < s->columns; k++)
                s->offsets[i * s->columns + k] = i * stride + s->offsets[k];
        s->columns *= size;
    }
    if (s->columns == 1 && e->dim > 1 && e->sizes[e->dim - 1] * s->from_size <= ROW_BYTES) {
        s->row = take_dimension(e, &s->row_stride);
        s->columns = 0;
    }
    s->each = s->row > 1 ? s->row : s->columns;
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
    const bool as_double = s.from == OPJIT_FLOAT32 && result == OPJIT_FLOAT64;
    s.as = as_double || converts_the_sum(s.from, result, x->numel) ? s.from : result;
    s.form = form_of(s.as, as_double);
    s.from_size = (int64_t)opjit_dtype_size(s.from);
    s.as_size = (int64_t)opjit_dtype_size(s.as);
    OPJIT_TRY(opjit_elements_of(&s.positions, 1, (const opjit_tensor *[]){&view}));
    arrange(&s);
    OPJIT_TRY(add_all(&s, &all));
    store(&all, opjit_is_integral(s.as), repeats, out);
    return OPJIT_OK;
}
