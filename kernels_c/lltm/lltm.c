/*
 * The LLTM cell on the CPU; lltm.h has its formulas.
 *
 * Forward: torch's matrix product writes z to the memory of the gates, and loops over each row compute all results.
 * Backward: loops compute dz, and torch's product computes the gradients from it. The compiler can vectorize every
 * loop, for any strides. It cannot vectorize calls of libm, so the exponential function is here.
 *
 * torch's product needs 85 % of the time of a forward and 90 % of a backward with batch 16, 32 features and 128
 * states, and more for larger cells. Therefore the cell is as fast as the BLAS of torch. `python
 * tests/benchmarks/lltm.py` shows it.
 */
#include <tgmath.h>

#include "lltm.h"

#define ELEMENTS_A_THREAD 8192 /* at least: 20 us of work */

static int64_t rows_a_thread(int64_t columns)
{
    return ELEMENTS_A_THREAD / (columns + 1) + 1;
}

#ifdef OPJIT_OP_lltm_forward

/* ---------------------------------------------------------------------------------------------- */
/* Forward                                                                                        */

/*
 * exp(x) = scale (1 + p) for x <= 0, with an error of 1 unit in the last place: x = n log 2 + r with an integer n, the
 * scale is 2^n, and p = expm1(r) is a polynomial (W. J. Cody, W. Waite: Software Manual for the Elementary Functions,
 * 1980, chapter 6). Where exp(x) is subnormal, p and scale are meaningless.
 */
static inline float exp_parts_f32(float x, float *scale)
{
    const float magic = 0x1.8p23f, shifted = x * 0x1.715476p0f + magic; /* the sum is rounded: its last bits are n */
    const float n = shifted - magic;
    const float r = x - n * 0x1.62e4p-1f - n * 1.4286068203e-6f; /* log 2 in two parts; the first product is exact */
    const float q = 0.5f + r * (0.16666576954f + r * (0.041666554572f + r * (0.0083631850315f + r * 0.0013926191056f)));
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23;
    memcpy(scale, &bits, sizeof bits);
    return r + r * r * q;
}

static inline double exp_parts_f64(double x, double *scale)
{
    const double magic = 0x1.8p52, shifted = x * 0x1.71547652b82fep0 + magic;
    const double n = shifted - magic;
    const double r = x - n * 0x1.62e42fefa2p-1 - n * 7.3710025657651677990e-13, r2 = r * r, r4 = r2 * r2;
    const double q0 = 0.5 + r * 0.16666666666666671 + r2 * (0.0416666666666666698 + r * 0.00833333333332612936);
    const double q1 = 0.00138888888888837442 + r * 0.000198412698748407686 +
                      r2 * (2.48015873255621258e-05 + r * 2.75572553746587421e-06);
    const double q2 = 2.75572736248664763e-07 + r * 2.51052276365517591e-08 + r2 * 2.09146945603515916e-09;
    uint64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 1023) << 52;
    memcpy(scale, &bits, sizeof bits);
    return r + r2 * (q0 + r4 * (q1 + r4 * q2));
}

/* exp(x) counts as 0 below `lowest`. Errors in units in the last place: expm1 1.5, sigmoid 2.5, tanh 3. */
#define GATE_FUNCTIONS(real, suffix, lowest) \
    static inline real expm1_##suffix(real x) /* for x <= 0 */ \
    { \
        real scale, p = exp_parts_##suffix(x, &scale); \
        return x < lowest ? -1 : scale * p + (scale - 1); \
    } \
    static inline real elu_##suffix(real x) \
    { \
        return x > 0 ? x : expm1_##suffix(x); \
    } \
    static inline real sigmoid_##suffix(real x) \
    { \
        real scale, below = -fabs(x), p = exp_parts_##suffix(below, &scale), \
                    e = below < lowest ? 0 : scale * p + scale; \
        return (x < 0 ? e : 1) / (1 + e); \
    } \
    static inline real tanh_##suffix(real x) \
    { \
        real m = expm1_##suffix(-2 * fabs(x)); \
        return copysign(m / (2 + m), x); \
    }

GATE_FUNCTIONS(float, f32, -87.0f)
GATE_FUNCTIONS(double, f64, -708.0)

#define ELU(x_) _Generic(x_, float: elu_f32, double: elu_f64)(x_)
#define SIGMOID(x_) _Generic(x_, float: sigmoid_f32, double: sigmoid_f64)(x_)
#define TANH(x_) _Generic(x_, float: tanh_f32, double: tanh_f64)(x_)

/* Compute all results of some rows from z without the bias, which is in the memory of the gates. */
static opjit_status activate_rows(int64_t begin, int64_t end, void *context)
{
    const lltm_forward_call *c = context;
    const int64_t state = c->n.state, bias_step = c->bias->strides[0], old_step = c->old_cell->strides[1];
    OPJIT_DISPATCH_FLOATING(c->gates->dtype, "lltm_forward", {
        const scalar_t *bias = c->bias->data;
        for (int64_t b = begin; b < end; b++) {
            const scalar_t *old_cell = (const scalar_t *)c->old_cell->data + b * c->old_cell->strides[0];
            scalar_t *new_cell = (scalar_t *)c->new_cell->data + b * state,
                     *new_h = (scalar_t *)c->new_h->data + b * state;
            scalar_t *i = (scalar_t *)c->gates->data + b * 4 * state, *o = i + state, *g = o + state, *t = g + state;
            for (int64_t s = 0; s < 3 * state; s++) /* i, o and g */
                i[s] += bias[s * bias_step];
            for (int64_t s = 0; s < 2 * state; s++) /* i and o */
                i[s] = SIGMOID(i[s]);
            for (int64_t s = 0; s < state; s++)
                g[s] = ELU(g[s]);
            for (int64_t s = 0; s < state; s++)
                new_cell[s] = old_cell[s * old_step] + g[s] * i[s];
            for (int64_t s = 0; s < state; s++)
                t[s] = TANH(new_cell[s]);
            for (int64_t s = 0; s < state; s++)
                new_h[s] = t[s] * o[s];
        }
    });
    return OPJIT_OK;
}

opjit_status lltm_forward_cpu(const opjit_tensor *input, const opjit_tensor *weights, const opjit_tensor *bias,
                              const opjit_tensor *old_h, const opjit_tensor *old_cell, opjit_tensor *new_h,
                              opjit_tensor *new_cell, opjit_tensor *gates)
{
    lltm_forward_call call = {input, weights, bias, old_h, old_cell, new_h, new_cell, gates, {0}};
    OPJIT_TRY(lltm_start_forward(&call));
    if (new_h->numel == 0)
        return OPJIT_OK;
    OPJIT_TRY(lltm_forward_products(&call));
    return opjit_parallel_for(0, call.n.batch, rows_a_thread(call.n.state), activate_rows, &call);
}

#endif
#ifdef OPJIT_OP_lltm_backward

/* ---------------------------------------------------------------------------------------------- */
/* Backward                                                                                       */

/* dz and the gradient of old_cell, for some rows. */
static opjit_status differentiate_rows(int64_t begin, int64_t end, void *context)
{
    const lltm_backward_call *l = context;
    const int64_t state = l->n.state, step = l->gates->strides[1];
    const int64_t h_step = l->grad_h->strides[1], cell_step = l->grad_cell->strides[1];
    OPJIT_DISPATCH_FLOATING(l->gates->dtype, "lltm_backward", {
        for (int64_t b = begin; b < end; b++) {
            const scalar_t *i = (const scalar_t *)l->gates->data + b * l->gates->strides[0], *o = i + state * step;
            const scalar_t *g = o + state * step, *t = g + state * step;
            const scalar_t *h = (const scalar_t *)l->grad_h->data + b * l->grad_h->strides[0];
            const scalar_t *cell = (const scalar_t *)l->grad_cell->data + b * l->grad_cell->strides[0];
            scalar_t *old_cell = (scalar_t *)l->grad_old_cell->data + b * state;
            scalar_t *dz0 = (scalar_t *)l->dz->data + b * 3 * state, *dz1 = dz0 + state, *dz2 = dz1 + state;
            for (int64_t s = 0; s < state; s++)
                old_cell[s] = cell[s * cell_step] + h[s * h_step] * o[s * step] * (1 - t[s * step] * t[s * step]);
            for (int64_t s = 0; s < state; s++)
                dz0[s] = old_cell[s] * g[s * step] * i[s * step] * (1 - i[s * step]);
            for (int64_t s = 0; s < state; s++)
                dz1[s] = h[s * h_step] * t[s * step] * o[s * step] * (1 - o[s * step]);
            for (int64_t s = 0; s < state; s++)
                dz2[s] = old_cell[s] * i[s * step] * (g[s * step] > 0 ? 1 : g[s * step] + 1);
        }
    });
    return OPJIT_OK;
}

#define COLUMNS 64 /* of dz that are added up at once */

/* The gradient of the bias: the sums of some columns of dz, in double. */
static opjit_status add_up_columns(int64_t begin, int64_t end, void *context)
{
    const lltm_backward_call *l = context;
    const int64_t columns = 3 * l->n.state;
    OPJIT_DISPATCH_FLOATING(l->dz->dtype, "lltm_backward", {
        for (int64_t first = begin * COLUMNS; first < end * COLUMNS && first < columns; first += COLUMNS) {
            const int64_t count = columns - first < COLUMNS ? columns - first : COLUMNS;
            scalar_t *bias = (scalar_t *)l->grad_bias->data + first;
            double sums[COLUMNS] = {0};
            for (int64_t b = 0; b < l->n.batch; b++) {
                const scalar_t *row = (const scalar_t *)l->dz->data + b * columns + first;
                for (int64_t s = 0; s < count; s++)
                    sums[s] += row[s];
            }
            for (int64_t s = 0; s < count; s++)
                bias[s] = (scalar_t)sums[s];
        }
    });
    return OPJIT_OK;
}

/* The caller frees dz. */
static opjit_status run_backward(lltm_backward_call *c)
{
    double zero = 0;
    const int64_t strides[2] = {0, 0}, columns = 3 * c->n.state, parts = (columns + COLUMNS - 1) / COLUMNS;
    const int64_t rows =
        columns > 0 ? c->n.batch : 0; /* no pointer arithmetic on an empty tensor, because its data may be NULL */
    const opjit_tensor zeros = {.data = &zero, .strides = strides};
    c->grad_h = c->grad_h ? c->grad_h : &zeros;
    c->grad_cell = c->grad_cell ? c->grad_cell : &zeros;
    OPJIT_TRY(lltm_output(c->dz, c->n.batch, columns, c->gates));
    OPJIT_TRY(opjit_parallel_for(0, rows, rows_a_thread(columns), differentiate_rows, c));
    if (c->parameters)
        OPJIT_TRY(opjit_parallel_for(0, parts, rows_a_thread(COLUMNS * c->n.batch), add_up_columns, c));
    return lltm_backward_products(c, c->dz);
}

opjit_status lltm_backward_cpu(const opjit_tensor *grad_h, const opjit_tensor *grad_cell, const opjit_tensor *gates,
                               const opjit_tensor *input, const opjit_tensor *weights, const opjit_tensor *old_h,
                               const opjit_bools *output_mask, opjit_tensor *grad_input, opjit_tensor *grad_weights,
                               opjit_tensor *grad_bias, opjit_tensor *grad_old_h, opjit_tensor *grad_old_cell)
{
    opjit_tensor dz = {0};
    lltm_backward_call call = {grad_h,      grad_cell,  gates,        input,     weights,    old_h,
                               output_mask, grad_input, grad_weights, grad_bias, grad_old_h, grad_old_cell,
                               &dz,         {0},        false,        false};
    OPJIT_TRY(lltm_start_backward(&call));
    opjit_status status = run_backward(&call);
    if (dz.handle)
        (void)aoti_torch_delete_tensor_object(dz.handle);
    return status;
}

#endif
