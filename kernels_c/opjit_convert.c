/*
 * opjit_convert.c - opjit_convert() of opjit_convert.h.
 *
 * float16 and bfloat16 from and to float32 are converted eight at a time, since sums and additions of halves go this
 * way. All else is converted element by element, in 1 to 3 ns. On ARM, gcc makes vectors of the plain loops, whatever
 * the length of the machine's, and pieces of the vectors of 32 bytes; only what narrows to float16 stays scalar in
 * NEON.
 */
#define OPJIT_PLACE NULL, 0 /* an author gets the place of the call */
#include "opjit_convert.h"

#define EACH(i_) for (int64_t i_ = 0; i_ < n; i_++)

/* ---------------------------------------------------------------------------------------------- */
/* Copies                                                                                         */

typedef struct word128 {
    uint64_t half[2];
} word128;

/* Copy an element n times: copy the filled part again until it fills the row. */
static void repeat(int64_t n, const void *from, size_t bytes, void *to)
{
    const size_t all = (size_t)n * bytes;
    if (n > 0)
        memcpy(to, from, bytes);
    for (size_t done = bytes; done < all; done *= 2)
        memcpy((char *)to + done, to, done < all - done ? done : all - done);
}

static void gather(int64_t n, const void *from, int64_t stride, size_t bytes, void *to)
{
#define GATHER(type_) \
    do { \
        const type_ *f = (const type_ *)from; \
        type_ *t = (type_ *)to; \
        for (; n >= 4; n -= 4, f += 4 * stride, t += 4) \
            t[0] = f[0], t[1] = f[stride], t[2] = f[2 * stride], t[3] = f[3 * stride]; \
        EACH(i) \
            t[i] = f[i * stride]; \
    } while (0)
    if (stride == 1)
        memcpy(to, from, (size_t)n * bytes);
    else if (stride == 0)
        repeat(n, from, bytes, to);
    else if (bytes == 1)
        GATHER(uint8_t);
    else if (bytes == 2)
        GATHER(uint16_t);
    else if (bytes == 4)
        GATHER(uint32_t);
    else if (bytes == 8)
        GATHER(uint64_t);
    else
        GATHER(word128);
}

/* ---------------------------------------------------------------------------------------------- */
/* Halves: eight at a time, then the rest                                                         */

typedef float float4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef float float8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t word8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t half8 __attribute__((vector_size(16), aligned(2), may_alias));

static void widen_bfloat16(int64_t n, const opjit_bfloat16 *from, float *to)
{
#ifndef __aarch64__
    for (; n >= 8; n -= 8, from += 8, to += 8)
        *(float8 *)to = (float8)(__builtin_convertvector(*(const half8 *)from, word8) << 16);
#endif
    EACH(i)
        to[i] = opjit_bfloat16_to_float(from[i]);
}

/* As opjit_float_to_bfloat16() does. */
static void narrow_bfloat16(int64_t n, const float *from, opjit_bfloat16 *to)
{
#ifndef __aarch64__
    for (; n >= 8; n -= 8, from += 8, to += 8) {
        word8 bits = *(const word8 *)from, nan = (word8)((bits & 0x7fffffff) > 0x7f800000);
        word8 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        *(half8 *)to = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), half8);
    }
#endif
    EACH(i)
        to[i] = opjit_float_to_bfloat16(from[i]);
}

static void widen_float16(int64_t n, const opjit_half *from, float *to)
{
#ifdef __F16C__
    typedef short short8 __attribute__((vector_size(16), aligned(2), may_alias));
    for (; n >= 8; n -= 8, from += 8, to += 8)
        *(float8 *)to = __builtin_ia32_vcvtph2ps256(*(const short8 *)from);
#endif
    EACH(i)
        to[i] = opjit_half_to_float(from[i]);
}

static void narrow_float16(int64_t n, const float *from, opjit_half *to)
{
#ifdef __F16C__
    for (; n >= 8; n -= 8, from += 8, to += 8)
        *(half8 *)to = (half8)__builtin_ia32_vcvtps2ph256(*(const float8 *)from, 0);
#elif defined(__aarch64__)
    for (; n >= 8; n -= 8, from += 8, to += 8) {
        half8 both;
        __asm__("fcvtn %0.4h, %1.4s\n\tfcvtn2 %0.8h, %2.4s"
                : "=&w"(both)
                : "w"(*(const float4 *)from), "w"(*(const float4 *)(from + 4)));
        *(half8 *)to = both;
    }
#endif
    EACH(i)
        to[i] = opjit_float_to_half(from[i]);
}

/* ---------------------------------------------------------------------------------------------- */
/* Any dtypes                                                                                     */

static void convert_each(int64_t n, const void *from, opjit_dtype from_dtype, int64_t stride, void *to,
                         opjit_dtype to_dtype)
{
    if (to_dtype == OPJIT_FLOAT64)
        EACH(i)
            ((double *)to)[i] = opjit_load_double(from, i * stride, from_dtype);
    else if (opjit_is_floating(to_dtype) || opjit_is_float8(to_dtype))
        EACH(i)
            opjit_store_float(to, i, to_dtype, opjit_load_float(from, i * stride, from_dtype));
    else if (opjit_is_integral(from_dtype))
        EACH(i)
            opjit_store_int64(to, i, to_dtype, opjit_load_int64(from, i * stride, from_dtype));
    else
        EACH(i)
            opjit_store_int64(to, i, to_dtype,
                              opjit_integer_of(opjit_load_double(from, i * stride, from_dtype), to_dtype));
}

void opjit_convert(int64_t n, const void *from, opjit_dtype from_dtype, int64_t stride, void *to, opjit_dtype to_dtype)
{
    if (from_dtype == to_dtype)
        gather(n, from, stride, opjit_dtype_size(from_dtype), to);
    else if (stride == 1 && from_dtype == OPJIT_BFLOAT16 && to_dtype == OPJIT_FLOAT32)
        widen_bfloat16(n, (const opjit_bfloat16 *)from, (float *)to);
    else if (stride == 1 && from_dtype == OPJIT_FLOAT32 && to_dtype == OPJIT_BFLOAT16)
        narrow_bfloat16(n, (const float *)from, (opjit_bfloat16 *)to);
    else if (stride == 1 && from_dtype == OPJIT_FLOAT16 && to_dtype == OPJIT_FLOAT32)
        widen_float16(n, (const opjit_half *)from, (float *)to);
    else if (stride == 1 && from_dtype == OPJIT_FLOAT32 && to_dtype == OPJIT_FLOAT16)
        narrow_float16(n, (const float *)from, (opjit_half *)to);
    else
        convert_each(n, from, from_dtype, stride, to, to_dtype);
}
