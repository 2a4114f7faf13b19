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

#define ADDITION(name_, type_, operator_) \
    static void name_(int64_t n, const void *a, const void *b, void *to) \
    { \
        const type_ *x = (const type_ *)a, *y = (const type_ *)b; \
        type_ *restrict z = (type_ *)to; \
        for (int64_t i = 0; i < n; i++) \
            z[i] = (type_)(x[i] operator_ y[i]); \
    }

/* Integers wrap around, signed ones as the unsigned of their size. */
ADDITION(add_bool, uint8_t, |)
ADDITION(add_8, uint8_t, +)
ADDITION(add_16, uint16_t, +)
ADDITION(add_32, uint32_t, +)
ADDITION(add_64, uint64_t, +)
ADDITION(add_float32, float, +)
ADDITION(add_float64, double, +)

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
    [OPJIT_FLOAT32] = add_float32,
    [OPJIT_FLOAT64] = add_float64,
    [OPJIT_COMPLEX64] = add_complex64,
    [OPJIT_COMPLEX128] = add_complex128,
};

/* ---------------------------------------------------------------------------------------------- */
/* Rows                                                                                           */

typedef struct sum {
    opjit_dtype self, other, result;
    opjit_dtype as;       /* the dtype to add in: the result's, or float32 for halves */
    const int64_t *bytes; /* of an element of the result, self and other */
} sum;

/*
 * n contiguous elements in the dtype of the addition: in place, or in the buffer. There, an element that is
 * broadcast to the row stays from the first piece on.
 */
static const void *load(const sum *s, bool first, int64_t n, const void *data, int64_t stride, opjit_dtype dtype,
                        void *buffer)
{
    uint16_t halves[PIECE / sizeof(float)];
    const int64_t read = stride == 0 ? 1 : n;
    const bool rounds = s->as != s->result; /* a single float32 also rounds, although it has the dtype to add in */
    if (stride == 1 && !rounds && opjit_has_same_bits(dtype, s->as))
        return data;
    if (stride == 0 && !first)
        return buffer;
    if (dtype != s->result && rounds && opjit_dtype_size(dtype) > 1) { /* torch rounds to halves first */
        opjit_convert(read, data, dtype, stride, halves, s->result);
        opjit_convert(read, halves, s->result, 1, buffer, s->as);
    } else {
        opjit_convert(read, data, dtype, stride, buffer, s->as);
    }
    if (stride == 0)
        opjit_convert(n - 1, buffer, s->as, 0, (char *)buffer + opjit_dtype_size(s->as), s->as);
    return buffer;
}

/* The result is dense and the first operand, so its elements are contiguous. */
static void add_row(int64_t n, void *const *data, const int64_t *strides, const void *context)
{
    const sum *s = (const sum *)context;
    const bool in_place = strides[1] == 1 && strides[2] == 1 && opjit_has_same_bits(s->self, s->as) &&
                          opjit_has_same_bits(s->other, s->as);
    const int64_t piece = in_place ? n : PIECE / (int64_t)opjit_dtype_size(s->as);
    uint64_t self[PIECE / 8], other[PIECE / 8];
    float sums[PIECE / sizeof(float)];
    for (int64_t i = 0; i < n; i += piece) {
        const int64_t part = n - i < piece ? n - i : piece;
        const void *a =
            load(s, i == 0, part, (const char *)data[1] + i * strides[1] * s->bytes[1], strides[1], s->self, self);
        const void *b =
            load(s, i == 0, part, (const char *)data[2] + i * strides[2] * s->bytes[2], strides[2], s->other, other);
        void *to = (char *)data[0] + i * s->bytes[0];
        additions[s->as](part, a, b, s->as == s->result ? to : sums);
        if (s->as != s->result)
            opjit_convert(part, sums, s->as, 1, to, s->result);
    }
}

opjit_status add_custom_cpu(const opjit_tensor *self, const opjit_tensor *other, opjit_tensor *out)
{
    opjit_elements elements;
    sum s = {self->dtype, other->dtype, OPJIT_OTHER_DTYPE, OPJIT_OTHER_DTYPE, elements.bytes};
    OPJIT_TRY(opjit_result_dtype(self, other, &s.result));
    OPJIT_CHECK(s.result < OPJIT_COMPLEX64 || s.self == s.other,
                "add_custom takes two complex tensors of one dtype, not %s and %s; convert one of them with .to()",
                opjit_dtype_name(s.self), opjit_dtype_name(s.other));
    OPJIT_CHECK(s.result != OPJIT_OTHER_DTYPE && !opjit_is_float8(s.result),
                "add_custom takes bool, integers, floating and complex dtypes, not %s and %s", opjit_dtype_name(s.self),
                opjit_dtype_name(s.other));
    s.as = s.result == OPJIT_FLOAT16 || s.result == OPJIT_BFLOAT16 ? OPJIT_FLOAT32 : s.result;
    OPJIT_TRY(opjit_empty_broadcast(out, self, other, s.result));
    OPJIT_TRY(opjit_elements_of(&elements, 3, (const opjit_tensor *[]){out, self, other}));
    return opjit_for_rows(&elements, add_row, &s);
}
