/*
 * add_custom on the CPU: self + other, with torch.add's broadcasting, dtypes and results.
 *
 * Additions are loops over elements of one dtype that lie side by side. What does not lie so, or has another dtype than
 * the result, is first brought into a buffer of PIECE elements, which stays in the first cache.
 *
 * Layout of this file: additions, pieces, entry.
 */
#include "opjit_elementwise.h"

/* ---------------------------------------------------------------------------------------------- */
/* Additions                                                                                      */

/* Written with vectors, so there is nothing for the compiler's later passes, and they take longer than all others. */
#ifndef __clang__
#pragma GCC optimize "Og"
#endif

typedef OPJIT_VECTOR(uint8_t, OPJIT_VECTOR_BYTES) uint8s;
typedef OPJIT_VECTOR(uint16_t, OPJIT_VECTOR_BYTES) uint16s;
typedef OPJIT_VECTOR(uint32_t, OPJIT_VECTOR_BYTES) uint32s;
typedef OPJIT_VECTOR(uint64_t, OPJIT_VECTOR_BYTES) uint64s;
typedef OPJIT_VECTOR(float, OPJIT_VECTOR_BYTES) floats;
typedef OPJIT_VECTOR(double, OPJIT_VECTOR_BYTES) doubles;

typedef void addition(int64_t n, const void *a, const void *b, void *to);

/* to[i] = an expression of the vectors x and y of elements of a and b */
#define ADDITION(name_, type_, vector_, ...) \
    static void name_(int64_t n, const void *a, const void *b, void *to) \
    { \
        OPJIT_MAP_VECTORS(vector_, n, (type_ *)to, a, b, __VA_ARGS__); \
    }

/* Integers wrap around, signed ones as the unsigned of their size. */
ADDITION(add_bool, uint8_t, uint8s, x | y)
ADDITION(add_8, uint8_t, uint8s, x + y)
ADDITION(add_16, uint16_t, uint16s, x + y)
ADDITION(add_32, uint32_t, uint32s, x + y)
ADDITION(add_64, uint64_t, uint64s, x + y)
ADDITION(add_float32, float, floats, x + y)
ADDITION(add_float64, double, doubles, x + y)

/* The sum as the upper half of each word, rounded to even: what opjit_float_to_bfloat16 does. */
static inline uint32s bfloat16s_of(floats sum)
{
    uint32s bits = (uint32s)sum, nan = (uint32s)((bits & 0x7fffffffu) > 0x7f800000u);
    return ((bits + 0x7fffu + (bits >> 16 & 1u)) & ~nan & 0xffff0000u) | (nan & 0x7fc00000u);
}

/* A word holds two bfloat16; each is the upper half of a float. */
ADDITION(add_bfloat16, opjit_bfloat16, uint32s,
         bfloat16s_of((floats)(x << 16) + (floats)(y << 16)) >> 16 |
             bfloat16s_of((floats)(x & 0xffff0000u) + (floats)(y & 0xffff0000u)))

/* float16: the hardware converts half a register to a whole one. */
#ifdef __F16C__
typedef OPJIT_VECTOR(short, OPJIT_VECTOR_BYTES / 2) halfs;
ADDITION(add_float16, opjit_half, halfs,
         __builtin_ia32_vcvtps2ph256(__builtin_ia32_vcvtph2ps256(x) + __builtin_ia32_vcvtph2ps256(y), 0))
#else
static void add_float16(int64_t n, const void *a, const void *b, void *to)
{
    for (int64_t i = 0; i < n; i++)
        ((opjit_half *)to)[i] = opjit_float_to_half(opjit_half_to_float(((const opjit_half *)a)[i]) +
                                                    opjit_half_to_float(((const opjit_half *)b)[i]));
}
#endif

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
    [OPJIT_BOOL] = add_bool,           [OPJIT_UINT8] = add_8,
    [OPJIT_INT8] = add_8,              [OPJIT_INT16] = add_16,
    [OPJIT_INT32] = add_32,            [OPJIT_INT64] = add_64,
    [OPJIT_UINT16] = add_16,           [OPJIT_UINT32] = add_32,
    [OPJIT_UINT64] = add_64,           [OPJIT_FLOAT16] = add_float16,
    [OPJIT_BFLOAT16] = add_bfloat16,   [OPJIT_FLOAT32] = add_float32,
    [OPJIT_FLOAT64] = add_float64,     [OPJIT_COMPLEX64] = add_complex64,
    [OPJIT_COMPLEX128] = add_complex128,
};

/* ---------------------------------------------------------------------------------------------- */
/* Pieces                                                                                         */

#define PIECE 512 /* elements */

/* These loops are not written with vectors, and some optimisation shows; the compiler's own vectors take it too long. */
#ifndef __clang__
#pragma GCC optimize "O1"
#endif

#define EACH(i) for (int64_t i = 0; i < n; i++)

typedef struct bits128 {
    uint64_t half[2];
} bits128;

/* Copy the bits of n elements that lie `stride` elements apart. */
static void gather(int64_t n, const void *from, int64_t stride, int64_t bytes, void *to)
{
#define GATHER(type_) EACH(i) ((type_ *)to)[i] = ((const type_ *)from)[i * stride]
    if (bytes == 1)
        GATHER(uint8_t);
    else if (bytes == 2)
        GATHER(uint16_t);
    else if (bytes == 4)
        GATHER(uint32_t);
    else if (bytes == 8)
        GATHER(uint64_t);
    else
        GATHER(bits128);
}

/* Repeat the first of n elements, which are at most PIECE. */
static void repeat(int64_t n, int64_t bytes, void *to)
{
    size_t done = (size_t)bytes, all = (size_t)(n * bytes);
    for (; done < all; done *= 2)
        memcpy((char *)to + done, to, done < all - done ? done : all - done);
}

/* The same, converted to a wide type. bool elements are 0 or 1. */
#define WIDEN(name_, type_) \
    static void name_(int64_t n, const void *from, int64_t stride, opjit_dtype dtype, type_ *to) \
    { \
        switch (dtype) { \
            OPJIT_CASE(OPJIT_BOOL, uint8_t, { EACH(i) to[i] = (type_)((const scalar_t *)from)[i * stride]; }) \
            OPJIT_CASES_INTEGRAL({ EACH(i) to[i] = (type_)((const scalar_t *)from)[i * stride]; }) \
            OPJIT_CASES_FLOATING({ EACH(i) to[i] = (type_)((const scalar_t *)from)[i * stride]; }) \
            OPJIT_CASE(OPJIT_FLOAT16, opjit_half, \
                       { EACH(i) to[i] = (type_)opjit_half_to_float(((const scalar_t *)from)[i * stride]); }) \
            OPJIT_CASE(OPJIT_BFLOAT16, opjit_bfloat16, \
                       { EACH(i) to[i] = (type_)opjit_bfloat16_to_float(((const scalar_t *)from)[i * stride]); }) \
        default: break; \
        } \
    }

WIDEN(widen_float64, double)
WIDEN(widen_float32, float)

static void widen_int64(int64_t n, const void *from, int64_t stride, opjit_dtype dtype, int64_t *to)
{
    switch (dtype) {
        OPJIT_CASE(OPJIT_BOOL, uint8_t, { EACH(i) to[i] = (int64_t)((const scalar_t *)from)[i * stride]; })
        OPJIT_CASES_INTEGRAL({ EACH(i) to[i] = (int64_t)((const scalar_t *)from)[i * stride]; })
    default: break;
    }
}

/* Convert n elements to another dtype that torch.result_type gives together with theirs. */
static void convert(int64_t n, const void *from, int64_t stride, opjit_dtype dtype, opjit_dtype result, void *to)
{
    union {
        int64_t integers[PIECE];
        float floats[PIECE];
    } wide;
    if (result == OPJIT_FLOAT64)
        widen_float64(n, from, stride, dtype, (double *)to);
    else if (result == OPJIT_FLOAT32)
        widen_float32(n, from, stride, dtype, (float *)to);
    else if (opjit_is_floating(result))
        widen_float32(n, from, stride, dtype, wide.floats);
    else
        widen_int64(n, from, stride, dtype, wide.integers);
    switch (result) {
        OPJIT_CASE(OPJIT_FLOAT16, opjit_half, { EACH(i) ((scalar_t *)to)[i] = opjit_float_to_half(wide.floats[i]); })
        OPJIT_CASE(OPJIT_BFLOAT16, opjit_bfloat16,
                   { EACH(i) ((scalar_t *)to)[i] = opjit_float_to_bfloat16(wide.floats[i]); })
        OPJIT_CASES_INTEGRAL({ EACH(i) ((scalar_t *)to)[i] = (scalar_t)wide.integers[i]; })
    default: break;
    }
}

/* ---------------------------------------------------------------------------------------------- */
/* Entry                                                                                          */

typedef struct sum {
    opjit_dtype self, other, result;
    const int64_t *bytes; /* of an element of the result, self and other */
} sum;

/*
 * n elements of the result's dtype that lie side by side: where they are, or in the buffer. One element that is broadcast
 * to the whole row stays in the buffer from the first piece on.
 */
static const void *loaded(const sum *s, bool first, int64_t n, const void *data, int64_t stride, opjit_dtype dtype,
                          void *buffer)
{
    const int64_t read = stride != 0 ? n : 1;
    if (dtype == s->result && stride == 1)
        return data;
    if (stride == 0 && !first)
        return buffer;
    if (dtype != s->result)
        convert(read, data, stride, dtype, s->result, buffer);
    else
        gather(read, data, stride, s->bytes[0], buffer);
    if (read < n)
        repeat(n, s->bytes[0], buffer);
    return buffer;
}

/* The elements of the result, which is dense and the first operand, lie side by side. */
static void add_row(int64_t n, void *const *data, const int64_t *strides, const void *context)
{
    const sum *s = (const sum *)context;
    addition *add = additions[s->result];
    if (strides[1] == 1 && strides[2] == 1 && s->self == s->other) {
        add(n, data[1], data[2], data[0]);
        return;
    }
    bits128 buffer_a[PIECE], buffer_b[PIECE];
    char *to = (char *)data[0];
    const char *a = (const char *)data[1], *b = (const char *)data[2];
    for (int64_t i = 0; i < n; i += PIECE) {
        int64_t part = n - i < PIECE ? n - i : PIECE;
        add(part, loaded(s, i == 0, part, a + i * strides[1] * s->bytes[1], strides[1], s->self, buffer_a),
            loaded(s, i == 0, part, b + i * strides[2] * s->bytes[2], strides[2], s->other, buffer_b), to + i * s->bytes[0]);
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
    OPJIT_CHECK(s.result != OPJIT_OTHER_DTYPE, "add_custom takes bool, integers, floating and complex dtypes, not %s and %s",
                opjit_dtype_name(s.self), opjit_dtype_name(s.other));
    OPJIT_TRY(opjit_empty_broadcast(out, self, other, s.result));
    OPJIT_TRY(opjit_elements_of(&elements, 3, (const opjit_tensor *[]){out, self, other}));
    return opjit_for_rows(&elements, add_row, &s);
}
