/*
 * add_custom on the CPU: self + other, with torch.add's broadcasting, dtypes and results.
 *
 * Additions are plain loops over contiguous elements of one dtype, and the compiler vectorizes them. Operands that are
 * not contiguous, or have another dtype than the result, are first converted into a buffer of PIECE elements, which
 * stays in the L1 cache. float16 and bfloat16 are added as float32 and rounded, like in torch.
 *
 * Large additions run at the speed of memory: tests/benchmarks/elementwise.py.
 */
#include "opjit_convert.h"
#include "opjit_elementwise.h"

#define PIECE 4096 /* bytes */

/* ---------------------------------------------------------------------------------------------- */
/* Additions                                                                                      */

typedef void addition(int64_t n, const void *a, const void *b, void *to);

#define ADDITION(name_, type_, sum_) \
    static void name_(int64_t n, const void *a, const void *b, void *to) \
    { \
        const type_ *x = (const type_ *)a, *y = (const type_ *)b; \
        type_ *restrict z = (type_ *)to; \
        for (int64_t i = 0; i < n; i++) \
            z[i] = sum_; \
    }

/* Integers wrap around, signed ones as the unsigned of their size. */
ADDITION(add_bool, uint8_t, (uint8_t)(x[i] | y[i]))
ADDITION(add_8, uint8_t, (uint8_t)(x[i] + y[i]))
ADDITION(add_16, uint16_t, (uint16_t)(x[i] + y[i]))
ADDITION(add_32, uint32_t, x[i] + y[i])
ADDITION(add_64, uint64_t, x[i] + y[i])
ADDITION(add_float32, float, x[i] + y[i])
ADDITION(add_float64, double, x[i] + y[i])
/* The sum of two floats, rounded to a bfloat16, which is the upper half of a float. */
OPJIT_INLINE uint32_t sum_of_bfloat16(uint32_t x, uint32_t y)
{
    const opjit_bfloat16 sum = opjit_float_to_bfloat16(opjit_float_of_bits(x) + opjit_float_of_bits(y));
    return (uint32_t)sum.bits << 16;
}

/* Two at a time, which is twice as fast: the lower half of a word becomes a float by a shift, the upper one by a mask. */
static void add_bfloat16(int64_t n, const void *a, const void *b, void *to)
{
    typedef uint32_t pair __attribute__((aligned(2), may_alias));
    const pair *x = (const pair *)a, *y = (const pair *)b;
    pair *restrict z = (pair *)to;
    for (int64_t i = 0; i < n / 2; i++)
        z[i] = sum_of_bfloat16(x[i] << 16, y[i] << 16) >> 16 | sum_of_bfloat16(x[i] & 0xffff0000u, y[i] & 0xffff0000u);
    if (n % 2 == 1) {
        const uint32_t last =
            sum_of_bfloat16((uint32_t)((const uint16_t *)a)[n - 1] << 16, (uint32_t)((const uint16_t *)b)[n - 1] << 16);
        ((uint16_t *)to)[n - 1] = (uint16_t)(last >> 16);
    }
}

static void add_float16(int64_t n, const void *a, const void *b, void *to)
{
    const opjit_half *x = (const opjit_half *)a, *y = (const opjit_half *)b;
    opjit_half *z = (opjit_half *)to;
    for (; n >= 8; n -= 8, x += 8, y += 8, z += 8) {
        float sums[8], others[8];
        opjit_load_halves(x, sums);
        opjit_load_halves(y, others);
        for (int k = 0; k < 8; k++)
            sums[k] += others[k];
        opjit_store_halves(z, sums);
    }
    for (int64_t i = 0; i < n; i++)
        z[i] = opjit_float_to_half(opjit_half_to_float(x[i]) + opjit_half_to_float(y[i]));
}

/* A complex number is two real ones. */
static void add_complex64(int64_t n, const void *a, const void *b, void *to)
{
    add_float32(2 * n, a, b, to);
}

static void add_complex128(int64_t n, const void *a, const void *b, void *to)
{
    add_float64(2 * n, a, b, to);
}

static addition *const additions[] = {
    [OPJIT_BOOL] = add_bool,
    [OPJIT_UINT8] = add_8,
    [OPJIT_INT8] = add_8,
    [OPJIT_INT16] = add_16,
    [OPJIT_INT32] = add_32,
    [OPJIT_INT64] = add_64,
    [OPJIT_UINT16] = add_16,
    [OPJIT_UINT32] = add_32,
    [OPJIT_UINT64] = add_64,
    [OPJIT_FLOAT16] = add_float16,
    [OPJIT_BFLOAT16] = add_bfloat16,
    [OPJIT_FLOAT32] = add_float32,
    [OPJIT_FLOAT64] = add_float64,
    [OPJIT_COMPLEX64] = add_complex64,
    [OPJIT_COMPLEX128] = add_complex128,
};

/* ---------------------------------------------------------------------------------------------- */
/* Rows                                                                                           */

typedef struct sum {
    opjit_dtype self, other, result;
    const int64_t *bytes; /* of an element of the result, self and other */
} sum;

/*
 * n contiguous elements of the result's dtype: in place, or in the buffer. There, an element that is broadcast to the
 * row stays from the first piece on.
 */
static const void *load(const sum *s, bool first, int64_t n, const void *data, int64_t stride, opjit_dtype dtype,
                        void *buffer)
{
    if (stride == 1 && opjit_has_same_bits(dtype, s->result))
        return data;
    if (stride != 0 || first)
        opjit_convert(n, data, dtype, stride, buffer, s->result);
    return buffer;
}

/* The result is dense and the first operand, so its elements are contiguous. */
static void add_row(int64_t n, void *const *data, const int64_t *strides, const void *context)
{
    const sum *s = (const sum *)context;
    const bool in_place = strides[1] == 1 && strides[2] == 1 && opjit_has_same_bits(s->self, s->result) &&
                          opjit_has_same_bits(s->other, s->result);
    const int64_t piece = in_place ? n : PIECE / s->bytes[0];
    uint64_t self[PIECE / 8], other[PIECE / 8];
    for (int64_t i = 0; i < n; i += piece) {
        const int64_t part = n - i < piece ? n - i : piece;
        const void *a =
            load(s, i == 0, part, (const char *)data[1] + i * strides[1] * s->bytes[1], strides[1], s->self, self);
        const void *b =
            load(s, i == 0, part, (const char *)data[2] + i * strides[2] * s->bytes[2], strides[2], s->other, other);
        additions[s->result](part, a, b, (char *)data[0] + i * s->bytes[0]);
    }
}

opjit_status add_custom_cpu(const opjit_tensor *self, const opjit_tensor *other, opjit_tensor *out)
{
    opjit_elements elements;
    sum s = {self->dtype, other->dtype, OPJIT_OTHER_DTYPE, elements.bytes};
    OPJIT_TRY(opjit_result_dtype(self, other, &s.result));
    OPJIT_CHECK(s.result < OPJIT_COMPLEX64 || s.self == s.other,
                "add_custom takes two complex tensors of one dtype, not %s and %s; convert one of them with .to()",
                opjit_dtype_name(s.self), opjit_dtype_name(s.other));
    OPJIT_CHECK(s.result != OPJIT_OTHER_DTYPE && !opjit_is_float8(s.result),
                "add_custom takes bool, integers, floating and complex dtypes, not %s and %s", opjit_dtype_name(s.self),
                opjit_dtype_name(s.other));
    OPJIT_TRY(opjit_empty_broadcast(out, self, other, s.result));
    OPJIT_TRY(opjit_elements_of(&elements, 3, (const opjit_tensor *[]){out, self, other}));
    return opjit_for_rows(&elements, add_row, &s);
}
