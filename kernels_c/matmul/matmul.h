/*
 * A matrix product with the layers that follow it: the code that matmul.c and matmul.cu share, everything except their
 * loops.
 *
 * For x (M, K), w (K, N), bias (N) and residual, which has the sizes of out,
 *
 *     z   = x w + bias
 *     out = activation(z) + residual
 *
 *     epilogue        activation(z)                                    out
 *     none            z                                                (M, N)
 *     relu            z if z > 0, otherwise 0                          (M, N)
 *     gelu            z (1 + erf(z / sqrt(2))) / 2                     (M, N)
 *     silu_multiply   silu(z[:, :F]) z[:, F:], where N is 2F, and      (M, F)
 *                     silu(z) = z / (1 + exp(-z))
 *
 * All tensors are float16, or all are bfloat16. Sums are float32, and only out is rounded.
 *
 * Contents: activations; checks
 */
#ifndef MATMUL_H
#define MATMUL_H

#include <math.h>

#include "opjit.h"

typedef enum matmul_epilogue { MATMUL_NONE, MATMUL_RELU, MATMUL_GELU, MATMUL_SILU_MULTIPLY } matmul_epilogue;

typedef struct matmul_call {
    const opjit_tensor *x, *w, *bias, *residual; /* bias, residual: NULL if absent */
    opjit_tensor *out;
    int64_t rows, depth, columns; /* M, K, and the columns of out: N, or F for silu_multiply */
    matmul_epilogue epilogue;
} matmul_call;

/* ---------------------------------------------------------------------------------------------- */
/* Activations of one element                                                                     */

OPJIT_HOST_DEVICE float matmul_silu(float z)
{
    return z / (1 + expf(-z));
}

/*
 * erf(x) with an error of at most 4e-7, by a minimax quotient that the compiler vectorizes. With libm's erff, a call
 * with gelu and 512 rows of 1024 elements takes ten times as long.
 */
OPJIT_HOST_DEVICE float matmul_erf(float x)
{
#ifdef __CUDA_ARCH__
    return erff(x);
#else
    const float t = x * x;
    const float p =
        1.12837898f +
        t * (0.196244928f + t * (0.0534669307f + t * (0.00400346544f + t * (0.000288036072f + t * 1.97484574e-06f))));
    const float q =
        1 + t * (0.507248701f + t * (0.116474739f + t * (0.0154440669f + t * (0.00121631347f + t * 3.7480742e-05f))));
    const float inside = x * p / q;
    return x >= 4 ? 1 : x <= -4 ? -1 : inside;
#endif
}

/* For all epilogues except silu_multiply. NaN stays NaN. */
OPJIT_HOST_DEVICE float matmul_activate(float z, matmul_epilogue epilogue)
{
    switch (epilogue) {
    case MATMUL_RELU: return z <= 0 ? 0 : z;
    case MATMUL_GELU: return 0.5f * z * (1 + matmul_erf(z * 0.70710678118654752f));
    default: return z;
    }
}

/* ---------------------------------------------------------------------------------------------- */
/* Checks                                                                                         */

/* Check the dtype and sizes of one more argument; NULL is None and needs no check. */
static opjit_status matmul_check(const matmul_call *c, const char *name, const opjit_tensor *t, int64_t dim,
                                 const int64_t *sizes)
{
    if (!t)
        return OPJIT_OK;
    OPJIT_CHECK(t->dtype == c->x->dtype, "matmul: `%s` is %s, but `x` is %s; convert one of them with .to()", name,
                opjit_dtype_name(t->dtype), opjit_dtype_name(c->x->dtype));
    OPJIT_CHECK(t->dim == dim, "matmul: `%s` must have %d dimension%s, not %d", name, (int)dim, dim == 1 ? "" : "s",
                (int)t->dim);
    for (int64_t d = 0; d < dim; d++)
        OPJIT_CHECK(t->sizes[d] == sizes[d],
                    "matmul: dimension %d of `%s` is %lld, but must be %lld for `x` (%lld, %lld) and `w` (%lld, %lld)",
                    (int)d, name, (long long)t->sizes[d], (long long)sizes[d], (long long)c->x->sizes[0],
                    (long long)c->x->sizes[1], (long long)c->w->sizes[0], (long long)c->w->sizes[1]);
    return OPJIT_OK;
}

static opjit_status matmul_read_epilogue(const char *name, matmul_epilogue *epilogue)
{
    static const char *const names[] = {"none", "relu", "gelu", "silu_multiply"}; /* in the order of the enum */
    for (int i = 0; i < 4; i++)
        if (strcmp(name, names[i]) == 0) {
            *epilogue = (matmul_epilogue)i;
            return OPJIT_OK;
        }
    OPJIT_FAIL("matmul: `epilogue` must be none, relu, gelu or silu_multiply, not %.40s", name);
}

/* Check the arguments, fill the fields from `rows` on, and make `out`, which is contiguous. */
OPJIT_UNUSED static opjit_status matmul_start(matmul_call *c, const char *epilogue)
{
    const opjit_tensor *x = c->x, *w = c->w;
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT16 || x->dtype == OPJIT_BFLOAT16, "matmul takes float16 and bfloat16, not %s",
                opjit_dtype_name(x->dtype));
    OPJIT_CHECK(x->dim == 2 && w->dim == 2, "matmul: `x` and `w` must have 2 dimensions, not %d and %d", (int)x->dim,
                (int)w->dim);
    OPJIT_TRY(matmul_read_epilogue(epilogue, &c->epilogue));
    const bool halves = c->epilogue == MATMUL_SILU_MULTIPLY;
    const int64_t columns = w->sizes[1];
    OPJIT_CHECK(!halves || columns % 2 == 0,
                "matmul: `w` must have an even number of columns for silu_multiply, not %lld", (long long)columns);
    c->rows = x->sizes[0];
    c->depth = x->sizes[1];
    c->columns = halves ? columns / 2 : columns;

    const int64_t w_sizes[2] = {c->depth, columns}, out_sizes[2] = {c->rows, c->columns};
    OPJIT_TRY(matmul_check(c, "w", w, 2, w_sizes));
    OPJIT_TRY(matmul_check(c, "bias", c->bias, 1, &columns));
    OPJIT_TRY(matmul_check(c, "residual", c->residual, 2, out_sizes));
    return opjit_empty(c->out, 2, out_sizes, x->dtype, x);
}

#endif
