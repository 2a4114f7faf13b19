/*
 * lanes.h - add rows of elements at the speed of memory, for allreduce.c.
 *
 * The compiler must not reorder additions of floats, so a plain loop waits for each addition. Here, eight vectors
 * alternate, and each lane of a vector is a separate accumulator. Therefore nothing waits, and rounding errors stay
 * small. After a block of 16 steps, the lanes are added to wider lanes:
 *
 *   float16, bfloat16, float32   float lanes, which add at most 32 elements, then double lanes
 *   float64                      double lanes; block sums are added by TwoSum, which keeps the rounding errors
 *   8, 16 and 32-bit integers    64-bit words with several elements: both of each pair are added in
 *                                lanes of twice the width. The sign bit of signed elements is flipped, which moves
 *                                them into the unsigned range. At the end, this offset is subtracted.
 *   64-bit integers              lanes that wrap around, like in torch
 *
 * The code uses explicit vectors, because with autovectorized loops for all dtypes, gcc is 3x slower
 * (tests/benchmarks/cold.py).
 */
#ifndef LANES_H
#define LANES_H

#include "opjit.h"

/* One register: gcc spills wider vectors. 64 bytes would gain nothing with AVX-512: the caches deliver no more. */
#ifdef __AVX__
#define VECTOR 32
#else
#define VECTOR 16
#endif
#define STEP 8   /* vectors */
#define BLOCK 16 /* steps */

/* In memory, at any address. */
#define VECTOR_OF(type_, bytes_) type_ __attribute__((vector_size(bytes_), aligned(1), may_alias))
typedef VECTOR_OF(uint64_t, VECTOR) words;
typedef VECTOR_OF(uint32_t, VECTOR) words32;
typedef VECTOR_OF(float, VECTOR) floats;
typedef VECTOR_OF(double, VECTOR) doubles;
typedef VECTOR_OF(float, VECTOR / 2) half_floats; /* half as many */

/* ---------------------------------------------------------------------------------------------- */
/* Totals                                                                                         */

typedef struct total {
    uint64_t integer; /* modulo 2^64 */
    double sum, rest; /* sum + rest is the total; rest is what rounding took from sum */
} total;

/* The same in each lane. */
typedef struct lanes {
    words integer;
    doubles sum, rest;
} lanes;

/* TwoSum (Knuth, The Art of Computer Programming 2, section 4.2.2), for numbers and for vectors. */
#define ADD_EXACTLY(type_, to_, value_) \
    do { \
        const type_ value = (value_), before = (to_)->sum, after = before + value, added = after - before; \
        (to_)->sum = after; \
        (to_)->rest += (before - (after - added)) + (value - added); \
    } while (0)

static void add_total(const total *from, total *to)
{
    to->integer += from->integer;
    ADD_EXACTLY(double, to, from->sum);
    to->rest += from->rest;
}

static void add_doubles(doubles sum, lanes *to)
{
    ADD_EXACTLY(doubles, to, sum);
}

static void add_floats(floats sum, lanes *to)
{
    half_floats half[2];
    memcpy(half, &sum, sizeof half);
    add_doubles(__builtin_convertvector(half[0], doubles) + __builtin_convertvector(half[1], doubles), to);
}

static void add_words(words sum, lanes *to)
{
    to->integer += sum;
}

/* ---------------------------------------------------------------------------------------------- */
/* Kernels: each adds a block of at most BLOCK steps, of one row or of several, to the lanes       */

/* Add rows of adjacent vectors. The rows are `apart` bytes apart. */
typedef void kernel(const char *at, int64_t vectors, int64_t rows, int64_t apart, lanes *to);

/* The k-th vector of a type at `at`. */
#define AT(vector_, k_) (((const vector_ *)(const void *)at)[k_])

/*
 * load_(k) loads the k-th part of what is at `at`, of `parts_` parts in a vector; add_() adds the sum of all to the lanes.
 * An addition takes four cycles, and two can begin in each.
 */
#define KERNEL(name_, vector_, parts_, load_, add_) \
    static void name_(const char *at, int64_t vectors, int64_t rows, int64_t apart, lanes *to) \
    { \
        enum { PART = VECTOR / parts_ }; \
        vector_ a = {0}, b = {0}, c = {0}, d = {0}, e = {0}, f = {0}, g = {0}, h = {0}; \
        for (const char *row = at; rows > 0; rows--, row += apart) { \
            int64_t left = vectors * parts_; \
            for (at = row; left >= 8; left -= 8, at += 8 * PART) { \
                a += load_(0); \
                b += load_(1); \
                c += load_(2); \
                d += load_(3); \
                e += load_(4); \
                f += load_(5); \
                g += load_(6); \
                h += load_(7); \
            } \
            if (left >= 4) { \
                a += load_(0); \
                b += load_(1); \
                c += load_(2); \
                d += load_(3); \
                at += 4 * PART; \
            } \
            if (left % 4 >= 2) { \
                e += load_(0); \
                f += load_(1); \
                at += 2 * PART; \
            } \
            if (left % 2 == 1) \
                g += load_(0); \
        } \
        add_(((a + b) + (c + d)) + ((e + f) + (g + h)), to); \
    }

#define INT64(k_) AT(words, k_)
#define FLOAT64(k_) AT(doubles, k_)
#define FLOAT32(k_) AT(floats, k_)
#define FLOAT32_AS_DOUBLE(k_) __builtin_convertvector(AT(half_floats, k_), doubles)
/* A bfloat16 is the upper half of a float, and a word holds two. */
#define BFLOAT16(k_) (floats)(AT(words32, (k_) / 2) << ((k_) % 2 ? 0 : 16) & 0xffff0000u)

KERNEL(add_int64, words, 1, INT64, add_words)
KERNEL(add_float64, doubles, 1, FLOAT64, add_doubles)
KERNEL(add_float32, floats, 1, FLOAT32, add_floats)
KERNEL(add_float32_as_double, doubles, 2, FLOAT32_AS_DOUBLE, add_doubles)
KERNEL(add_bfloat16, floats, 2, BFLOAT16, add_floats)

#ifdef __F16C__
typedef VECTOR_OF(short, VECTOR / 2) halfs;
#define FLOAT16(k_) __builtin_ia32_vcvtph2ps256(AT(halfs, k_))
#elif defined(__aarch64__)
typedef VECTOR_OF(short, VECTOR / 2) halfs;
static floats from_float16(halfs from)
{
    floats result;
    __asm__("fcvtl %0.4s, %1.4h" : "=w"(result) : "w"(from)); /* gcc 12 converts the elements of a vector one by one */
    return result;
}
#define FLOAT16(k_) from_float16(AT(halfs, k_))
#else
static floats from_float16(const opjit_half *from)
{
    floats result;
    for (size_t i = 0; i < VECTOR / 4; i++)
        result[i] = opjit_half_to_float(from[i]);
    return result;
}
#define FLOAT16(k_) from_float16((const opjit_half *)(const void *)at + (k_) * VECTOR / 4)
#endif
KERNEL(add_float16, floats, 2, FLOAT16, add_floats)

/* The lower one of each pair of `bits`-wide integers in a word: 0x00ff00ff00ff00ff for 8. */
#define LOWER(bits_) (UINT64_MAX / ((UINT64_C(1) << (bits_)) + 1))

/* Integers of 8, 16 or 32 bits; `flip` has their sign bits if they are signed. A lane has room for 257 and gets 256. */
static void add_integers(const char *row, int64_t vectors, int64_t rows, int64_t apart, int bits, uint64_t flip,
                         lanes *to)
{
    words lower = {0}, upper = {0}, sum;
    for (; rows > 0; rows--, row += apart)
        for (int64_t k = 0; k < vectors; k++) {
            const words value = ((const words *)(const void *)row)[k] ^ flip;
            lower += value & LOWER(bits);
            upper += value >> bits & LOWER(bits);
        }
    for (sum = lower + upper; (bits *= 2) < 64;)
        sum = (sum & LOWER(bits)) + (sum >> bits & LOWER(bits));
    to->integer += sum;
}

/* ---------------------------------------------------------------------------------------------- */

/*
 * Add rows of n elements that are `stride` elements apart. Eight sums of single elements take less time than to put the
 * elements next to each other first.
 */
typedef void scattered(const char *at, int64_t n, int64_t stride, int64_t rows, int64_t apart, lanes *to);

#define SCATTERED(name_, type_, vector_, add_) \
    static void name_(const char *at, int64_t n, int64_t stride, int64_t rows, int64_t apart, lanes *to) \
    { \
        type_ a = 0, b = 0, c = 0, d = 0, e = 0, f = 0, g = 0, h = 0; \
        for (; rows > 0; rows--, at += apart) { \
            const type_ *x = (const type_ *)(const void *)at; \
            int64_t left = n; \
            for (; left >= 8; left -= 8, x += 4 * stride) { \
                a += x[0]; \
                b += x[stride]; \
                c += x[2 * stride]; \
                d += x[3 * stride]; \
                x += 4 * stride; \
                e += x[0]; \
                f += x[stride]; \
                g += x[2 * stride]; \
                h += x[3 * stride]; \
            } \
            if (left >= 4) { \
                a += x[0]; \
                b += x[stride]; \
                c += x[2 * stride]; \
                d += x[3 * stride]; \
                x += 4 * stride; \
            } \
            if (left % 4 >= 2) { \
                e += x[0]; \
                f += x[stride]; \
                x += 2 * stride; \
            } \
            if (left % 2 == 1) \
                g += x[0]; \
        } \
        const type_ sums[] = {a, b, c, d, e, f, g, h}; \
        vector_ vectors[sizeof sums / VECTOR]; \
        memcpy(vectors, sums, sizeof sums); \
        for (size_t i = 0; i < sizeof sums / VECTOR; i++) \
            add_(vectors[i], to); \
    }

SCATTERED(add_scattered_int64, uint64_t, words, add_words)
SCATTERED(add_scattered_float32, float, floats, add_floats)
SCATTERED(add_scattered_float64, double, doubles, add_doubles)

/* ---------------------------------------------------------------------------------------------- */

/* How elements of a dtype are added. */
typedef struct form {
    kernel *add;          /* NULL: add_integers */
    scattered *scattered; /* NULL: collect them first */
    int bits;             /* of an element */
    uint64_t flip;        /* the sign bits of a word of signed integers; an element with these bits adds nothing */
} form;

static kernel *kernel_of(opjit_dtype dtype, bool as_double)
{
    switch (dtype) {
    case OPJIT_INT64:
    case OPJIT_UINT64: return add_int64;
    case OPJIT_FLOAT16: return add_float16;
    case OPJIT_BFLOAT16: return add_bfloat16;
    case OPJIT_FLOAT32: return as_double ? add_float32_as_double : add_float32;
    case OPJIT_FLOAT64: return add_float64;
    default: return NULL;
    }
}

static scattered *scattered_of(opjit_dtype dtype, bool as_double)
{
    switch (dtype) {
    case OPJIT_INT64:
    case OPJIT_UINT64: return add_scattered_int64;
    case OPJIT_FLOAT32: return as_double ? NULL : add_scattered_float32;
    case OPJIT_FLOAT64: return add_scattered_float64;
    default: return NULL;
    }
}

/* float32 optionally in double lanes. */
static form form_of(opjit_dtype dtype, bool as_double)
{
    const int bits = 8 * (int)opjit_dtype_size(dtype);
    const bool flips = dtype == OPJIT_INT8 || dtype == OPJIT_INT16 || dtype == OPJIT_INT32;
    const uint64_t ones = flips ? UINT64_MAX / ((UINT64_C(1) << bits) - 1) : 0; /* 0x0101010101010101 for 8 */
    return (form){kernel_of(dtype, as_double), scattered_of(dtype, as_double), bits, ones << (bits - 1)};
}

/* Add rows of adjacent vectors. The rows are `apart` bytes apart. */
static void add_vectors(const form *f, const char *at, int64_t vectors, int64_t rows, int64_t apart, lanes *to)
{
    const int64_t most = STEP * BLOCK, steps = (vectors + STEP - 1) / STEP;
    const int64_t height = steps > 0 && steps < BLOCK ? BLOCK / steps : 1;
    for (int64_t row = 0; row < rows; row += height)
        for (int64_t i = 0; i < vectors; i += most) {
            const char *block = at + row * apart + i * VECTOR;
            const int64_t some = vectors - i < most ? vectors - i : most;
            const int64_t many = rows - row < height ? rows - row : height;
            if (f->add)
                f->add(block, some, many, apart, to);
            else
                add_integers(block, some, many, apart, f->bits, f->flip, to);
        }
}

/* The same for n elements that are `stride` elements apart. A sum adds at most 2 * BLOCK of them. */
static void add_scattered(const form *f, const char *at, int64_t n, int64_t stride, int64_t rows, int64_t apart,
                          lanes *to)
{
    const int64_t most = 16 * BLOCK, height = n > 0 && n <= most ? 2 * BLOCK / ((n + 7) / 8) : 1;
    for (int64_t row = 0; row < rows; row += height)
        for (int64_t i = 0; i < n; i += most) {
            const char *block = at + row * apart + i * stride * f->bits / 8;
            const int64_t some = n - i < most ? n - i : most;
            f->scattered(block, some, stride, rows - row < height ? rows - row : height, apart, to);
        }
}

/* The total of n elements that were added to the lanes. */
static total total_of(const form *f, const lanes *from, int64_t n)
{
    total all = {0, 0, 0};
    for (size_t i = 0; i < VECTOR / 8; i++)
        add_total(&(total){from->integer[i], from->sum[i], from->rest[i]}, &all);
    if (f->flip)
        all.integer -= (uint64_t)n << (f->bits - 1);
    return all;
}

#endif
