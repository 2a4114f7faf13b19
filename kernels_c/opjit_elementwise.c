/*
 * opjit_elementwise.c - the functions of opjit_elementwise.h, and strided access for opjit.h.
 *
 * Contents: results, elements, rows
 */
#define OPJIT_PLACE NULL, 0 /* an author gets the place of the call */
#include "opjit_elementwise.h"

/* ---------------------------------------------------------------------------------------------- */
/* Results                                                                                        */

/* The size of t in dimension d of the `dim` dimensions it broadcasts to; sizes are matched from the last dimension. */
static int64_t size_among(const opjit_tensor *t, int64_t dim, int64_t d)
{
    return d < dim - t->dim ? 1 : t->sizes[d - dim + t->dim];
}

opjit_status opjit_empty_broadcast(opjit_tensor *out, const opjit_tensor *a, const opjit_tensor *b, opjit_dtype dtype)
{
    int64_t sizes[OPJIT_MAX_DIM], dim = a->dim > b->dim ? a->dim : b->dim;
    bool like_a = a->dim == dim, like_b = b->dim == dim;
    OPJIT_CHECK(dim <= OPJIT_MAX_DIM, "a tensor has at most %d dimensions", OPJIT_MAX_DIM);
    for (int64_t d = 0; d < dim; d++) {
        int64_t of_a = size_among(a, dim, d), of_b = size_among(b, dim, d);
        OPJIT_CHECK(
            of_a == of_b || of_a == 1 || of_b == 1,
            "expected sizes that broadcast: equal or 1 in each dimension, counted from the last; dimension %lld "
            "has %lld in one tensor and %lld in the other",
            (long long)(d - dim), (long long)of_a, (long long)of_b);
        sizes[d] = of_a == 1 ? of_b : of_a;
        like_a = like_a && of_a == sizes[d];
        like_b = like_b && of_b == sizes[d];
    }
    if (like_a || like_b)
        return opjit_empty_like(out, like_a ? a : b, dtype);
    return opjit_empty(out, dim, sizes, dtype, a);
}

opjit_status opjit_promote(opjit_dtype a, opjit_dtype b, opjit_dtype *to)
{
    opjit_dtype low = a < b ? a : b, high = a < b ? b : a; /* the enum's order is nearly torch's */
    *to = high;
    if (low == high)
        return OPJIT_OK;
    const opjit_dtype odd = opjit_is_float8(low) ? low : high;
    OPJIT_CHECK(odd != OPJIT_OTHER_DTYPE && !opjit_is_float8(odd),
                "%s cannot be combined with another dtype; convert it with .to()", opjit_dtype_name(odd));
    OPJIT_CHECK(high < OPJIT_UINT16 || high > OPJIT_UINT64,
                "%s and %s have no common dtype in torch; convert one of them with .to()", opjit_dtype_name(a),
                opjit_dtype_name(b));
    if (low == OPJIT_UINT8 && high == OPJIT_INT8)
        *to = OPJIT_INT16;
    else if (low == OPJIT_FLOAT16 && high == OPJIT_BFLOAT16)
        *to = OPJIT_FLOAT32;
    else if (low == OPJIT_FLOAT64 && high == OPJIT_COMPLEX64)
        *to = OPJIT_COMPLEX128;
    return OPJIT_OK;
}

opjit_status opjit_result_dtype(const opjit_tensor *a, const opjit_tensor *b, opjit_dtype *to)
{
    opjit_dtype strong = a->dim > 0 ? a->dtype : b->dtype, weak = a->dim > 0 ? b->dtype : a->dtype;
    *to = strong;
    if (strong == weak)
        return OPJIT_OK;
    if ((a->dim > 0) == (b->dim > 0) || strong == OPJIT_BOOL ||
        (opjit_is_integral(strong) && !opjit_is_integral(weak)) || weak == OPJIT_OTHER_DTYPE ||
        strong == OPJIT_OTHER_DTYPE || opjit_is_float8(weak) || opjit_is_float8(strong))
        return opjit_promote(a->dtype, b->dtype, to);
    if (opjit_is_floating(strong) && weak >= OPJIT_COMPLEX64) /* complex, of the strong dtype's precision */
        *to = strong == OPJIT_FLOAT64   ? OPJIT_COMPLEX128
              : strong == OPJIT_FLOAT32 ? OPJIT_COMPLEX64
                                        : OPJIT_OTHER_DTYPE;
    return OPJIT_OK;
}

/* ---------------------------------------------------------------------------------------------- */
/* Elements                                                                                       */

/* Add an innermost dimension, or lengthen the last one where this one continues it in every operand. */
static void add_dimension(opjit_elements *e, int64_t size, const int64_t *strides)
{
    bool continues = e->dim > 0;
    for (int k = 0; continues && k < e->operands; k++)
        continues = e->strides[e->dim - 1][k] == strides[k] * size;
    if (continues)
        e->sizes[--e->dim] *= size;
    else
        e->sizes[e->dim] = size;
    memcpy(e->strides[e->dim++], strides, sizeof e->strides[0]);
}

/* Add every dimension of tensors[0], in the order of decreasing strides if `sorted`. */
static void add_dimensions(opjit_elements *e, const opjit_tensor *const *tensors, bool sorted)
{
    const opjit_tensor *first = tensors[0];
    int64_t order[OPJIT_MAX_DIM], strides[OPJIT_MAX_OPERANDS] = {0};
    for (int64_t d = 0; d < first->dim; d++) {
        int64_t at = d;
        for (; sorted && at > 0 && first->strides[order[at - 1]] < first->strides[d]; at--)
            order[at] = order[at - 1];
        order[at] = d;
    }
    for (int64_t i = 0; i < first->dim; i++) {
        int64_t d = order[i];
        for (int k = 0; k < e->operands; k++) {
            int64_t own = d - first->dim + tensors[k]->dim; /* sizes are matched from the last dimension */
            strides[k] = own < 0 || tensors[k]->sizes[own] == 1 ? 0 : tensors[k]->strides[own];
        }
        if (first->sizes[d] != 1)
            add_dimension(e, first->sizes[d], strides);
    }
}

static void set_elements(opjit_elements *e, int count, const opjit_tensor *const *tensors, bool sorted)
{
    bool packed = true;
    e->operands = count;
    e->numel = tensors[0]->numel;
    e->dim = 1;
    e->sizes[0] = e->numel;
    for (int k = 0; k < count; k++) {
        e->data[k] = tensors[k]->data;
        e->bytes[k] = (int64_t)opjit_dtype_size(tensors[k]->dtype);
        e->strides[0][k] = 1;
        packed = packed && tensors[k]->contiguous && tensors[k]->numel == e->numel;
    }
    if (packed || e->numel <= 1)
        return;
    e->dim = 0;
    add_dimensions(e, tensors, sorted);
}

opjit_status opjit_elements_of(opjit_elements *e, int count, const opjit_tensor *const *tensors)
{
    OPJIT_CHECK(count > 0 && count <= OPJIT_MAX_OPERANDS, "expected 1 to %d tensors to walk together, not %d",
                OPJIT_MAX_OPERANDS, count);
    set_elements(e, count, tensors, true);
    return OPJIT_OK;
}

opjit_elements opjit_in_order(const opjit_tensor *x, const opjit_tensor *y)
{
    const opjit_tensor *tensors[] = {x, y};
    opjit_elements e;
    set_elements(&e, y ? 2 : 1, tensors, false);
    return e;
}

bool opjit_same_sizes(const opjit_tensor *x, const opjit_tensor *y)
{
    bool same = x->dim == y->dim;
    for (int64_t d = 0; same && d < x->dim; d++)
        same = x->sizes[d] == y->sizes[d];
    return same;
}

void opjit_split_complex(opjit_elements *e)
{
    const int64_t ones[OPJIT_MAX_OPERANDS] = {1, 1, 1, 1};
    e->numel *= 2;
    for (int k = 0; k < e->operands; k++)
        e->bytes[k] /= 2;
    for (int64_t d = 0; d < e->dim; d++)
        for (int k = 0; k < e->operands; k++)
            e->strides[d][k] *= 2;
    add_dimension(e, 2, ones);
}

/* ---------------------------------------------------------------------------------------------- */
/* Rows                                                                                           */

opjit_walk opjit_walk_of(const opjit_elements *e, int64_t begin, int64_t end)
{
    opjit_walk w;
    const int64_t inner = e->dim - 1;
    int64_t index = begin;
    w.i = begin;
    w.end = end;
    if (begin >= end) /* valid for an empty tensor, because nothing divides by a size of 0 */
        return w;
    memset(w.at, 0, sizeof w.at);
    memcpy(w.steps, e->strides[inner], sizeof w.steps);
    for (int64_t d = inner; d >= 0; d--) {
        w.index[d] = index % e->sizes[d];
        index /= e->sizes[d];
        for (int k = 0; k < e->operands; k++)
            w.at[k] += w.index[d] * e->strides[d][k];
    }
    const int64_t left = e->sizes[inner] - w.index[inner];
    w.row_end = end - begin < left ? end : begin + left;
    return w;
}

void opjit_rows_between(const opjit_elements *e, int64_t begin, int64_t end, opjit_row *row, const void *context)
{
    void *data[OPJIT_MAX_OPERANDS];
    for (opjit_walk w = opjit_walk_of(e, begin, end); w.i < w.end; opjit_next_row(&w, e, e->operands)) {
        for (int k = 0; k < e->operands; k++)
            data[k] = (char *)e->data[k] + w.at[k] * e->bytes[k];
        row(w.row_end - w.i, data, w.steps, context);
    }
}

typedef struct rows {
    const opjit_elements *elements;
    opjit_row *row;
    const void *context;
} rows;

static opjit_status rows_of_thread(int64_t begin, int64_t end, void *context)
{
    const rows *r = (const rows *)context;
    opjit_rows_between(r->elements, begin, end, r->row, r->context);
    return OPJIT_OK;
}

opjit_status opjit_for_rows(const opjit_elements *e, opjit_row *row, const void *context)
{
    rows r = {e, row, context};
    return opjit_parallel_for(0, e->numel, OPJIT_GRAIN, rows_of_thread, &r);
}
