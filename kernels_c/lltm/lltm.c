/*
 * The LLTM cell on the CPU; what it computes is in lltm.h.
 *
 * Forward: the rows of the product are the rows of the weights, read where they are; its columns are the rows of the
 * batch, in vectors. Backward: both products have columns that lie side by side in memory. So one kind of tile, a few rows
 * held in registers, does all of them, and nothing large is copied. The gates are vectors, too, with an exponential
 * function of their own.
 *
 * The order in which an element is added up depends on the sizes of the tensors alone, not on the number of threads.
 */

/* What runs once in a call needs few of gcc's passes, which cost more time than all else of a build. */
#ifndef __clang__
#pragma GCC push_options
#pragma GCC optimize "Og"
#endif

#include "lltm.h"

/*
 * A vector is one hardware register: wider types would be split and spilled. ROWS x VECTORS sums of a tile are in registers,
 * of which AVX-512 has 32 and others have 16, and enough of them not to wait for each other. In the forward a vector of
 * AVX-512 holds a batch of 16: there, a second one would be half empty.
 */
#if defined(__AVX512F__)
#define VECTOR 64
#define ROWS 8
#elif defined(__AVX__)
#define VECTOR 32
#define ROWS 4
#else
#define VECTOR 16
#define ROWS 4
#endif
#if defined(__AVX512F__) && defined(OPJIT_OP_lltm_forward)
#define VECTORS 1
#else
#define VECTORS 2
#endif

#define BLOCK 128                /* products that are added to one sum before that is added to the total */
#define STATES 32                /* that are worked on at once; whole vectors */
#define CHUNK 64                 /* rows of a product that are worked on at once; whole tiles */
#define FEW 4                    /* a panel is worth its zeros from a FEWth of it on */
#define WORTH_A_THREAD (1 << 21) /* multiplications */

#define APART __attribute__((noinline))
#define ALWAYS_INLINE inline __attribute__((always_inline))

#ifdef __clang__
#define SHUFFLE(a_, b_, ...) __builtin_shufflevector(a_, b_, __VA_ARGS__)
#else
#define SHUFFLE(a_, b_, ...) __builtin_shuffle(a_, b_, (NAME(indices)){__VA_ARGS__})
#endif

/* How many parts of so many multiplications a thread gets at least. */
static int64_t grain(int64_t multiplications)
{
    return WORTH_A_THREAD / (multiplications > 0 ? multiplications : 1) + 1;
}

/* Where the elements of a row lie side by side: in the tensor, or in a copy that lasts as long as the call. */
static opjit_status side_by_side(const opjit_tensor *t, const void **data, int64_t *row)
{
    const int64_t inner = t->dim - 1, columns = t->sizes[inner];
    const size_t size = opjit_dtype_size(t->dtype);
    void *copy;
    *data = t->data;
    if (row)
        *row = t->strides[0];
    if (t->strides[inner] == 1 || columns <= 1)
        return OPJIT_OK;
    OPJIT_TRY(opjit_scratch(&copy, t->numel * (int64_t)size, t));
    for (int64_t i = 0; i < t->numel; i++)
        memcpy((char *)copy + (size_t)i * size, (const char *)t->data + opjit_offset(t, i) * (int64_t)size, size);
    *data = copy;
    if (row)
        *row = columns;
    return OPJIT_OK;
}

/* Tiles are spelled out and need not many more. */
#ifndef __clang__
#pragma GCC push_options
#pragma GCC optimize "O2", "no-tree-vectorize", "no-schedule-insns2", "no-gcse", "no-tree-pre"
#endif

#define REAL float
#define WORD uint32_t
#define NAME(name_) name_##_f32
#define EXP_LOWEST (-40.0f) /* 1 + exp of it is 1 */
#define EXP_HIGHEST 89.5f   /* half of exp of it is infinite */
#define EXP_MAGIC 0x1.8p23f /* adding it rounds to an integer, in the last bits */
#define EXP_LOG2_HIGH 0x1.62e4p-1f /* few enough digits for an exact product with an exponent */
#define EXP_LOG2_LOW 1.4286068203e-6f
#define EXP_BIAS 127
#define EXP_DIGITS 23
#define EXP_POLYNOMIAL {0.5f, 0.16666576954f, 0.041666554572f, 0.0083631850315f, 0.0013926191056f}
#include "lltm_cpu.h"
#undef REAL
#undef WORD
#undef NAME
#undef EXP_LOWEST
#undef EXP_HIGHEST
#undef EXP_MAGIC
#undef EXP_LOG2_HIGH
#undef EXP_LOG2_LOW
#undef EXP_BIAS
#undef EXP_DIGITS
#undef EXP_POLYNOMIAL

#ifndef __clang__
#pragma GCC optimize "O1", "expensive-optimizations"
#endif

#define REAL double
#define WORD uint64_t
#define NAME(name_) name_##_f64
#define EXP_LOWEST (-60.0)
#define EXP_HIGHEST 710.5
#define EXP_MAGIC 0x1.8p52
#define EXP_LOG2_HIGH 0x1.62e42fefa2p-1
#define EXP_LOG2_LOW 7.3710025657651677990e-13
#define EXP_BIAS 1023
#define EXP_DIGITS 52
#define EXP_POLYNOMIAL \
    {0.5, 0.16666666666666671, 0.0416666666666666698, 0.00833333333332612936, 0.00138888888888837442, \
     0.000198412698748407686, 2.48015873255621258e-05, 2.75572553746587421e-06, 2.75572736248664763e-07, \
     2.51052276365517591e-08, 2.09146945603515916e-09}
#include "lltm_cpu.h"

#ifndef __clang__
#pragma GCC pop_options
#endif

#ifdef OPJIT_OP_lltm_forward

opjit_status lltm_forward_cpu(const opjit_tensor *input, const opjit_tensor *weights, const opjit_tensor *bias,
                              const opjit_tensor *old_h, const opjit_tensor *old_cell, opjit_tensor *new_h,
                              opjit_tensor *new_cell, opjit_tensor *gates)
{
    lltm_sizes n;
    OPJIT_TRY(lltm_check_forward(input, weights, bias, old_h, old_cell, &n));
    OPJIT_TRY(lltm_output(new_h, n.batch, n.state, input));
    OPJIT_TRY(lltm_output(new_cell, n.batch, n.state, input));
    OPJIT_TRY(lltm_output(gates, n.batch, 4 * n.state, input));
    if (n.batch * n.state == 0)
        return OPJIT_OK;
    if (input->dtype == OPJIT_FLOAT32)
        return run_forward_f32(&n, input, weights, bias, old_h, old_cell, (float *)new_h->data, (float *)new_cell->data,
                               (float *)gates->data);
    return run_forward_f64(&n, input, weights, bias, old_h, old_cell, (double *)new_h->data, (double *)new_cell->data,
                           (double *)gates->data);
}

#endif
#ifdef OPJIT_OP_lltm_backward

opjit_status lltm_backward_cpu(const opjit_tensor *grad_h, const opjit_tensor *grad_cell, const opjit_tensor *gates,
                               const opjit_tensor *input, const opjit_tensor *weights, const opjit_tensor *old_h, bool inputs,
                               bool parameters, opjit_tensor *grad_input, opjit_tensor *grad_weights, opjit_tensor *grad_bias,
                               opjit_tensor *grad_old_h, opjit_tensor *grad_old_cell)
{
    lltm_backward_call call = {grad_h,     grad_cell,    gates,     input,      weights,       old_h, inputs, parameters,
                               grad_input, grad_weights, grad_bias, grad_old_h, grad_old_cell, {0}};
    OPJIT_TRY(lltm_check_backward(&call));
    OPJIT_TRY(lltm_backward_outputs(&call));
    return input->dtype == OPJIT_FLOAT32 ? run_backward_f32(&call) : run_backward_f64(&call);
}

#endif

#ifndef __clang__
#pragma GCC pop_options
#endif
