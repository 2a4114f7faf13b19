/*
 * The LLTM cell: what lltm.c and lltm.cu share, which is all but their loops.
 *
 * An LLTM cell ("long long-term memory": an LSTM without a forget gate, with an elu) computes, for a batch of B rows,
 * F features and S states,
 *
 *     z  = [old_h, x] weights^T + bias          (B, 3S), in three parts z0, z1, z2
 *     i  = sigmoid(z0)   o = sigmoid(z1)   g = elu(z2)
 *     new_cell = old_cell + g i     t = tanh(new_cell)     new_h = t o
 *
 * weights are (3S, S + F): old_h's columns come first. `gates` holds i, o, g and t side by side, (B, 4S): all that the
 * backward needs of z, since i' = i (1 - i), o' = o (1 - o), t' = 1 - t^2, and elu' is 1 where g > 0, else g + 1. With
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

/* One argument and the number of dimensions that it must have. */
typedef struct lltm_argument {
    const opjit_tensor *tensor; /* NULL: None, which needs no check */
    const char *name;
    int64_t dim;
} lltm_argument;

static opjit_status lltm_check_tensors(const char *op, const lltm_argument *arguments, int count, opjit_dtype dtype)
{
    OPJIT_CHECK(dtype == OPJIT_FLOAT32 || dtype == OPJIT_FLOAT64, "%s takes float32 and float64, not %s", op,
                opjit_dtype_name(dtype));
    for (int i = 0; i < count; i++) {
        const opjit_tensor *t = arguments[i].tensor;
        if (!t)
            continue;
        OPJIT_CHECK(t->dtype == dtype, "%s: `%s` is %s, but `%s` is %s; convert one of them with .to()", op,
                    arguments[i].name, opjit_dtype_name(t->dtype), arguments[0].name, opjit_dtype_name(dtype));
        OPJIT_CHECK(t->dim == arguments[i].dim, "%s: `%s` must have %d dimension%s, not %d", op, arguments[i].name,
                    (int)arguments[i].dim, arguments[i].dim == 1 ? "" : "s", (int)t->dim);
    }
    return OPJIT_OK;
}

/* `source` says where the expected size comes from: "the batch of `x` is". */
static opjit_status lltm_check_size(const char *op, const opjit_tensor *t, const char *name, int d, int64_t size,
                                    const char *source)
{
    OPJIT_CHECK(!t || t->sizes[d] == size, "%s: dimension %d of `%s` is %lld, but %s %lld", op, d, name,
                t ? (long long)t->sizes[d] : 0, source, (long long)size);
    return OPJIT_OK;
}

/* The sizes of a call, from input, weights and old_h, once those agree. */
static opjit_status lltm_check_sizes(const char *op, const opjit_tensor *input, const opjit_tensor *weights,
                                     const opjit_tensor *old_h, lltm_sizes *n)
{
    n->batch = input->sizes[0];
    n->features = input->sizes[1];
    n->state = old_h->sizes[1];
    OPJIT_TRY(lltm_check_size(op, old_h, "old_h", 0, n->batch, "the batch of `x` is"));
    OPJIT_TRY(lltm_check_size(op, weights, "weights", 0, 3 * n->state, "three times the state size of `old_h` is"));
    return lltm_check_size(op, weights, "weights", 1, n->state + n->features,
                           "the state size of `old_h` and the features of `x` together are");
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
    const lltm_argument arguments[] = {{c->input, "x", 2},
                                       {c->weights, "weights", 2},
                                       {c->bias, "bias", 1},
                                       {c->old_h, "old_h", 2},
                                       {c->old_cell, "old_cell", 2}};
    OPJIT_TRY(lltm_check_tensors(op, arguments, 5, c->input->dtype));
    OPJIT_TRY(lltm_check_sizes(op, c->input, c->weights, c->old_h, &c->n));
    OPJIT_TRY(lltm_check_size(op, c->bias, "bias", 0, 3 * c->n.state, "three times the state size of `old_h` is"));
    OPJIT_TRY(lltm_check_size(op, c->old_cell, "old_cell", 0, c->n.batch, "the batch of `x` is"));
    OPJIT_TRY(lltm_check_size(op, c->old_cell, "old_cell", 1, c->n.state, "the state size of `old_h` is"));
    OPJIT_TRY(lltm_output(c->new_h, c->n.batch, c->n.state, c->input));
    OPJIT_TRY(lltm_output(c->new_cell, c->n.batch, c->n.state, c->input));
    return lltm_output(c->gates, c->n.batch, 4 * c->n.state, c->input);
}

typedef struct lltm_backward_call {
    const opjit_tensor *grad_h, *grad_cell; /* NULL: zeros */
    const opjit_tensor *gates, *input, *weights, *old_h;
    bool inputs, parameters; /* whose gradients are wanted; the other outputs have no elements */
    opjit_tensor *grad_input, *grad_weights, *grad_bias, *grad_old_h, *grad_old_cell;
    lltm_sizes n;
} lltm_backward_call;

/* Check the arguments and make the outputs. */
OPJIT_UNUSED static opjit_status lltm_start_backward(lltm_backward_call *c)
{
    const char *op = "lltm_backward";
    const lltm_argument arguments[] = {{c->input, "x", 2},       {c->weights, "weights", 2},
                                       {c->old_h, "old_h", 2},   {c->gates, "gates", 2},
                                       {c->grad_h, "grad_h", 2}, {c->grad_cell, "grad_cell", 2}};
    OPJIT_TRY(lltm_check_tensors(op, arguments, 6, c->input->dtype));
    OPJIT_TRY(lltm_check_sizes(op, c->input, c->weights, c->old_h, &c->n));
    for (int i = 3; i < 6; i++)
        OPJIT_TRY(lltm_check_size(op, arguments[i].tensor, arguments[i].name, 0, c->n.batch, "the batch of `x` is"));
    OPJIT_TRY(lltm_check_size(op, c->gates, "gates", 1, 4 * c->n.state, "four times the state size of `old_h` is"));
    OPJIT_TRY(lltm_check_size(op, c->grad_h, "grad_h", 1, c->n.state, "the state size of `old_h` is"));
    OPJIT_TRY(lltm_check_size(op, c->grad_cell, "grad_cell", 1, c->n.state, "the state size of `old_h` is"));

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
