/*
 * The LLTM cell: the code that lltm.c and lltm.cu share, everything except their loops.
 *
 * An LLTM cell ("long long-term memory": an LSTM without a forget gate, with an elu) computes, for a batch of B rows,
 * F features and S states,
 *
 *     z  = [old_h, x] weights^T + bias          (B, 3S), in three parts z0, z1, z2
 *     i  = sigmoid(z0)   o = sigmoid(z1)   g = elu(z2)
 *     new_cell = old_cell + g i     t = tanh(new_cell)     new_h = t o
 *
 * weights are (3S, S + F): old_h's columns come first. `gates` contains i, o, g and t, (B, 4S). The backward needs no
 * other part of z, because i' = i (1 - i), o' = o (1 - o), t' = 1 - t^2, and elu' is 1 if g > 0, otherwise g + 1. With
 * the gradients h and c of new_h and new_cell,
 *
 *     grad_old_cell = c + h o t'
 *     dz = [grad_old_cell g i', h t o', grad_old_cell i elu']          (B, 3S)
 *     [grad_old_h, grad_x] = dz weights     grad_weights = dz^T [old_h, x]     grad_bias = the sum of dz's rows
 *
 * Contents: checks; calls; matrix products
 */
#ifndef LLTM_H
#define LLTM_H

#include "opjit.h"

/* ---------------------------------------------------------------------------------------------- */
/* Checks                                                                                         */

typedef struct lltm_sizes {
    int64_t batch, features, state;
} lltm_sizes;

/* The sizes of a call, from x and old_h, with any number of features and states. */
static opjit_status lltm_read_sizes(const char *op, const opjit_tensor *x, const opjit_tensor *old_h, lltm_sizes *n)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 || x->dtype == OPJIT_FLOAT64, "%s takes float32 and float64, not %s", op,
                opjit_dtype_name(x->dtype));
    OPJIT_CHECK(x->dim == 2 && old_h->dim == 2, "%s: `x` and `old_h` must have 2 dimensions, not %d and %d", op,
                (int)x->dim, (int)old_h->dim);
    n->batch = x->sizes[0];
    n->features = x->sizes[1];
    n->state = old_h->sizes[1];
    return OPJIT_OK;
}

/* Check the dtype and sizes of one more argument; NULL is None and needs no check. */
static opjit_status lltm_check(const char *op, const opjit_tensor *x, const lltm_sizes *n, const char *name,
                               const opjit_tensor *t, int64_t dim, const int64_t *sizes)
{
    if (!t)
        return OPJIT_OK;
    OPJIT_CHECK(t->dtype == x->dtype, "%s: `%s` is %s, but `x` is %s; convert one of them with .to()", op, name,
                opjit_dtype_name(t->dtype), opjit_dtype_name(x->dtype));
    OPJIT_CHECK(t->dim == dim, "%s: `%s` must have %d dimension%s, not %d", op, name, (int)dim, dim == 1 ? "" : "s",
                (int)t->dim);
    for (int64_t d = 0; d < dim; d++)
        OPJIT_CHECK(t->sizes[d] == sizes[d],
                    "%s: dimension %d of `%s` is %lld, but must be %lld for a batch of %lld, %lld features (`x`) and "
                    "%lld states (`old_h`)",
                    op, (int)d, name, (long long)t->sizes[d], (long long)sizes[d], (long long)n->batch,
                    (long long)n->features, (long long)n->state);
    return OPJIT_OK;
}

/* ---------------------------------------------------------------------------------------------- */
/* Calls                                                                                          */

static opjit_status lltm_output(opjit_tensor *out, int64_t rows, int64_t columns, const opjit_tensor *like)
{
    const int64_t sizes[2] = {rows, columns};
    return opjit_empty(out, 2, sizes, like->dtype, like);
}

typedef struct lltm_forward_call {
    const opjit_tensor *input, *weights, *bias, *old_h, *old_cell;
    opjit_tensor *new_h, *new_cell, *gates;
    lltm_sizes n;
} lltm_forward_call;

/* Check the arguments and make the outputs. */
OPJIT_UNUSED static opjit_status lltm_start_forward(lltm_forward_call *c)
{
    const char *op = "lltm_forward";
    const opjit_tensor *x = c->input;
    const lltm_sizes *n = &c->n;
    OPJIT_TRY(lltm_read_sizes(op, x, c->old_h, &c->n));
    OPJIT_TRY(lltm_check(op, x, n, "old_h", c->old_h, OPJIT_SIZES(n->batch, n->state)));
    OPJIT_TRY(lltm_check(op, x, n, "weights", c->weights, OPJIT_SIZES(3 * n->state, n->state + n->features)));
    OPJIT_TRY(lltm_check(op, x, n, "bias", c->bias, OPJIT_SIZES(3 * n->state)));
    OPJIT_TRY(lltm_check(op, x, n, "old_cell", c->old_cell, OPJIT_SIZES(n->batch, n->state)));
    OPJIT_TRY(lltm_output(c->new_h, c->n.batch, c->n.state, c->input));
    OPJIT_TRY(lltm_output(c->new_cell, c->n.batch, c->n.state, c->input));
    return lltm_output(c->gates, c->n.batch, 4 * c->n.state, c->input);
}

typedef struct lltm_backward_call {
    const opjit_tensor *grad_h, *grad_cell; /* NULL: zeros */
    const opjit_tensor *gates, *input, *weights, *old_h;
    const opjit_bools *output_mask; /* which gradients are needed */
    opjit_tensor *grad_input, *grad_weights, *grad_bias, *grad_old_h, *grad_old_cell;
    opjit_tensor *dz; /* (B, 3S), if it is in separate memory */
    lltm_sizes n;
    bool inputs, parameters; /* the gradients to compute; the other outputs are empty */
} lltm_backward_call;

/* Check the arguments and make the outputs. */
OPJIT_UNUSED static opjit_status lltm_start_backward(lltm_backward_call *c)
{
    const char *op = "lltm_backward";
    const opjit_tensor *x = c->input;
    const lltm_sizes *n = &c->n;
    OPJIT_TRY(lltm_read_sizes(op, x, c->old_h, &c->n));
    OPJIT_TRY(lltm_check(op, x, n, "old_h", c->old_h, OPJIT_SIZES(n->batch, n->state)));
    OPJIT_TRY(lltm_check(op, x, n, "weights", c->weights, OPJIT_SIZES(3 * n->state, n->state + n->features)));
    OPJIT_TRY(lltm_check(op, x, n, "gates", c->gates, OPJIT_SIZES(n->batch, 4 * n->state)));
    OPJIT_TRY(lltm_check(op, x, n, "grad_new_h", c->grad_h, OPJIT_SIZES(n->batch, n->state)));
    OPJIT_TRY(lltm_check(op, x, n, "grad_new_cell", c->grad_cell, OPJIT_SIZES(n->batch, n->state)));
    OPJIT_CHECK(c->output_mask->len == 5, "%s: `output_mask` must have 5 elements, not %lld", op,
                (long long)c->output_mask->len);

    const bool *needed = c->output_mask->data; /* x, weights, bias, old_h, old_cell */
    c->inputs = needed[0] || needed[3];
    c->parameters = needed[1] || needed[2];
    const int64_t batch = c->n.batch, features = c->n.features, state = c->n.state,
                  bias = c->parameters ? 3 * state : 0;
    OPJIT_TRY(lltm_output(c->grad_input, c->inputs ? batch : 0, c->inputs ? features : 0, c->input));
    OPJIT_TRY(lltm_output(c->grad_weights, bias, c->parameters ? state + features : 0, c->input));
    OPJIT_TRY(opjit_empty(c->grad_bias, 1, &bias, c->input->dtype, c->input));
    OPJIT_TRY(lltm_output(c->grad_old_h, c->inputs ? batch : 0, c->inputs ? state : 0, c->input));
    return lltm_output(c->grad_old_cell, batch, state, c->input);
}

/* ---------------------------------------------------------------------------------------------- */
/* Matrix products, by torch                                                                      */

#ifdef __CUDACC__
#define LLTM_MM_OUT aoti_torch_cuda_mm_out
#define LLTM_ADDMM_OUT aoti_torch_cuda_addmm_out
#else
#define LLTM_MM_OUT aoti_torch_cpu_mm_out
#define LLTM_ADDMM_OUT aoti_torch_cpu_addmm_out
#endif

/* A matrix in a tensor's memory: element (r, c) is the tensor's first one + offset + r row_stride + c column_stride. */
typedef struct lltm_matrix {
    torch_tensor of;
    int64_t rows, columns, row_stride, column_stride, offset;
} lltm_matrix;

/* Some columns of a tensor of two dimensions. */
static lltm_matrix lltm_columns(const opjit_tensor *t, int64_t first, int64_t count)
{
    const lltm_matrix m = {t->handle, t->sizes[0], count, t->strides[0], t->strides[1], first * t->strides[1]};
    return m;
}

static lltm_matrix lltm_whole(const opjit_tensor *t)
{
    return lltm_columns(t, 0, t->sizes[1]);
}

static lltm_matrix lltm_transposed(lltm_matrix m)
{
    const lltm_matrix turned = {m.of, m.columns, m.rows, m.column_stride, m.row_stride, m.offset};
    return turned;
}

/* out = a b, or out += a b. */
static opjit_status lltm_multiply(lltm_matrix out, lltm_matrix a, lltm_matrix b, bool add)
{
    const lltm_matrix matrices[3] = {out, a, b};
    torch_tensor views[3] = {NULL, NULL, NULL};
    torch_error error = 0;
    for (int i = 0; i < 3 && !error; i++) {
        const int64_t sizes[2] = {matrices[i].rows, matrices[i].columns};
        const int64_t strides[2] = {matrices[i].row_stride, matrices[i].column_stride};
        error = aoti_torch__reinterpret_tensor(matrices[i].of, 2, sizes, strides, matrices[i].offset, &views[i]);
    }
    if (!error && add)
        error = LLTM_ADDMM_OUT(views[0], views[0], views[1], views[2], 1.0, 1.0);
    else if (!error)
        error = LLTM_MM_OUT(views[0], views[1], views[2]);
    opjit_status status = error ? opjit_torch_error(__FILE__, __LINE__, "torch's matrix product failed") : OPJIT_OK;
    for (int i = 0; i < 3; i++)
        if (views[i])
            (void)aoti_torch_delete_tensor_object(views[i]);
    return status;
}

/* gates[:, :3S] = [old_h, x] weights^T: z without the bias. */
OPJIT_UNUSED static opjit_status lltm_forward_products(const lltm_forward_call *c)
{
    const lltm_matrix z = lltm_columns(c->gates, 0, 3 * c->n.state);
    OPJIT_TRY(lltm_multiply(z, lltm_whole(c->old_h), lltm_transposed(lltm_columns(c->weights, 0, c->n.state)), false));
    return lltm_multiply(z, lltm_whole(c->input), lltm_transposed(lltm_columns(c->weights, c->n.state, c->n.features)),
                         true);
}

/* All gradients that are products of dz, which is (B, 3S). */
OPJIT_UNUSED static opjit_status lltm_backward_products(const lltm_backward_call *c, const opjit_tensor *dz)
{
    const int64_t state = c->n.state, features = c->n.features;
    if (c->inputs) {
        OPJIT_TRY(lltm_multiply(lltm_whole(c->grad_old_h), lltm_whole(dz), lltm_columns(c->weights, 0, state), false));
        OPJIT_TRY(lltm_multiply(lltm_whole(c->grad_input), lltm_whole(dz), lltm_columns(c->weights, state, features),
                                false));
    }
    if (c->parameters) {
        const lltm_matrix turned = lltm_transposed(lltm_whole(dz));
        OPJIT_TRY(lltm_multiply(lltm_columns(c->grad_weights, 0, state), turned, lltm_whole(c->old_h), false));
        OPJIT_TRY(lltm_multiply(lltm_columns(c->grad_weights, state, features), turned, lltm_whole(c->input), false));
    }
    return OPJIT_OK;
}

#endif
