/*
 * What lltm.c and lltm.cu share: the sizes of a call and the checks of its arguments.
 *
 * An LLTM cell ("long long-term memory": an LSTM without a forget gate, with an elu) computes, for a batch of B rows
 *
 *     z  = [old_h, x] weights^T + bias          (B, 3S), in three parts z0, z1, z2
 *     i  = sigmoid(z0)   o = sigmoid(z1)   g = elu(z2)
 *     new_cell = old_cell + g i     t = tanh(new_cell)     new_h = t o
 *
 * weights are (3S, S + F): old_h's columns come first. `gates` holds i, o, g and t side by side, (B, 4S): all that the
 * backward needs of z, since i' = i (1 - i), o' = o (1 - o), t' = 1 - t^2, and elu' is 1 where g > 0, else g + 1.
 */
#ifndef LLTM_H
#define LLTM_H

#include "opjit.h"

typedef struct lltm_sizes {
    int64_t batch, features, state;
} lltm_sizes;

/* One argument, as its check wants it. */
typedef struct lltm_argument {
    const opjit_tensor *tensor;
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

/* Dimension `d` of an argument is `size`, which `meaning` tells of. */
static opjit_status lltm_check_size(const char *op, const opjit_tensor *t, const char *name, int d, int64_t size,
                                    const char *meaning)
{
    OPJIT_CHECK(!t || t->sizes[d] == size, "%s: dimension %d of `%s` is %lld, but %s %lld", op, d, name,
                t ? (long long)t->sizes[d] : 0, meaning, (long long)size);
    return OPJIT_OK;
}

/* The sizes that follow from input, weights and old_h, once those agree. */
static opjit_status lltm_check_sizes(const char *op, const opjit_tensor *input, const opjit_tensor *weights,
                                     const opjit_tensor *old_h, lltm_sizes *sizes)
{
    sizes->batch = input->sizes[0];
    sizes->features = input->sizes[1];
    sizes->state = old_h->sizes[1];
    OPJIT_TRY(lltm_check_size(op, old_h, "old_h", 0, sizes->batch, "the batch of `x` is"));
    OPJIT_TRY(lltm_check_size(op, weights, "weights", 0, 3 * sizes->state, "three times the state size of `old_h` is"));
    return lltm_check_size(op, weights, "weights", 1, sizes->state + sizes->features,
                           "the state size of `old_h` and the features of `x` together are");
}

OPJIT_UNUSED static opjit_status lltm_check_forward(const opjit_tensor *input, const opjit_tensor *weights,
                                                    const opjit_tensor *bias, const opjit_tensor *old_h,
                                                    const opjit_tensor *old_cell, lltm_sizes *sizes)
{
    const char *op = "lltm_forward";
    const lltm_argument arguments[] = {
        {input, "x", 2}, {weights, "weights", 2}, {bias, "bias", 1}, {old_h, "old_h", 2}, {old_cell, "old_cell", 2}};
    OPJIT_TRY(lltm_check_tensors(op, arguments, 5, input->dtype));
    OPJIT_TRY(lltm_check_sizes(op, input, weights, old_h, sizes));
    OPJIT_TRY(lltm_check_size(op, bias, "bias", 0, 3 * sizes->state, "three times the state size of `old_h` is"));
    OPJIT_TRY(lltm_check_size(op, old_cell, "old_cell", 0, sizes->batch, "the batch of `x` is"));
    return lltm_check_size(op, old_cell, "old_cell", 1, sizes->state, "the state size of `old_h` is");
}

/* A call of lltm_backward: its arguments, then its results. */
typedef struct lltm_backward_call {
    const opjit_tensor *grad_h, *grad_cell, *gates, *input, *weights, *old_h;
    bool inputs, parameters; /* whose gradients are wanted */
    opjit_tensor *grad_input, *grad_weights, *grad_bias, *grad_old_h, *grad_old_cell;
    lltm_sizes n;
} lltm_backward_call;

OPJIT_UNUSED static opjit_status lltm_check_backward(lltm_backward_call *c)
{
    const char *op = "lltm_backward";
    const lltm_argument arguments[] = {{c->input, "x", 2}, {c->weights, "weights", 2}, {c->old_h, "old_h", 2},
                                       {c->gates, "gates", 2}, {c->grad_h, "grad_h", 2},   {c->grad_cell, "grad_cell", 2}};
    OPJIT_TRY(lltm_check_tensors(op, arguments, 6, c->input->dtype));
    OPJIT_TRY(lltm_check_sizes(op, c->input, c->weights, c->old_h, &c->n));
    for (int i = 3; i < 6; i++)
        OPJIT_TRY(lltm_check_size(op, arguments[i].tensor, arguments[i].name, 0, c->n.batch, "the batch of `x` is"));
    OPJIT_TRY(lltm_check_size(op, c->gates, "gates", 1, 4 * c->n.state, "four times the state size of `old_h` is"));
    OPJIT_TRY(lltm_check_size(op, c->grad_h, "grad_h", 1, c->n.state, "the state size of `old_h` is"));
    return lltm_check_size(op, c->grad_cell, "grad_cell", 1, c->n.state, "the state size of `old_h` is");
}

/* A (rows, columns) output. */
OPJIT_UNUSED static opjit_status lltm_output(opjit_tensor *out, int64_t rows, int64_t columns, const opjit_tensor *like)
{
    const int64_t sizes[2] = {rows, columns};
    return opjit_empty(out, 2, sizes, like->dtype, like);
}

/* The outputs of lltm_backward; those that are not wanted have no elements. */
OPJIT_UNUSED static opjit_status lltm_backward_outputs(const lltm_backward_call *c)
{
    const int64_t batch = c->n.batch, features = c->n.features, state = c->n.state, bias = c->parameters ? 3 * state : 0;
    OPJIT_TRY(lltm_output(c->grad_input, c->inputs ? batch : 0, c->inputs ? features : 0, c->input));
    OPJIT_TRY(lltm_output(c->grad_weights, bias, c->parameters ? state + features : 0, c->input));
    OPJIT_TRY(opjit_empty(c->grad_bias, 1, &bias, c->input->dtype, c->input));
    OPJIT_TRY(lltm_output(c->grad_old_h, c->inputs ? batch : 0, c->inputs ? state : 0, c->input));
    return lltm_output(c->grad_old_cell, batch, state, c->input);
}

#endif
