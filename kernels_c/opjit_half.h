/*
 * opjit_half.h - float16, bfloat16 and float8 in C. Read it only if your op supports these dtypes. opjit.h includes it.
 *
 * These are storage types without arithmetic: convert to float, compute, and convert back. Conversions round to
 * nearest, ties to even, and NaN stays NaN, like in torch.
 *
 *     opjit_half *x = (opjit_half *)out->data;
 *     x[0] = opjit_float_to_half(2 * opjit_half_to_float(x[0]));
 */
#ifndef OPJIT_HALF_H
#define OPJIT_HALF_H

#include <stdint.h>
#include <string.h>

/* A small function that a CUDA kernel can also call. */
#ifdef __CUDACC__
#define OPJIT_HOST_DEVICE __attribute__((unused, always_inline)) static inline __host__ __device__
#else
#define OPJIT_HOST_DEVICE __attribute__((unused, always_inline)) static inline
#endif

typedef struct opjit_half {
    uint16_t bits;
} opjit_half;

typedef struct opjit_bfloat16 {
    uint16_t bits;
} opjit_bfloat16;

typedef struct opjit_float8_e4m3fn {
    uint8_t bits;
} opjit_float8_e4m3fn;

typedef struct opjit_float8_e5m2 {
    uint8_t bits;
} opjit_float8_e5m2;

OPJIT_HOST_DEVICE float opjit_float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

OPJIT_HOST_DEVICE uint32_t opjit_bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* A bfloat16 is the upper half of a float. */
OPJIT_HOST_DEVICE float opjit_bfloat16_to_float(opjit_bfloat16 value)
{
    return opjit_float_of_bits((uint32_t)value.bits << 16);
}

OPJIT_HOST_DEVICE opjit_bfloat16 opjit_float_to_bfloat16(float value)
{
    opjit_bfloat16 result;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
#else
    uint32_t bits = opjit_bits_of_float(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        result.bits = 0x7fc0; /* NaN */
    else
        result.bits = (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
    return result;
}

OPJIT_HOST_DEVICE float opjit_half_to_float(opjit_half value)
{
#ifdef __CUDA_ARCH__
    float converted;
    asm("cvt.f32.f16 %0, %1;" : "=f"(converted) : "h"(value.bits));
    return converted;
#elif defined(__F16C__)
    typedef short opjit_halfs_ __attribute__((vector_size(16)));
    typedef long long opjit_words_ __attribute__((vector_size(16)));
    const opjit_words_ bits = {value.bits, 0};
    return __builtin_ia32_vcvtph2ps((opjit_halfs_)bits)[0];
#elif defined(__aarch64__) && !defined(__CUDACC__)
    __fp16 half; /* its conversions are instructions, which the compiler vectorizes in loops */
    memcpy(&half, &value, sizeof half);
    return half;
#else
    uint32_t sign = (uint32_t)(value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
    uint32_t bits;
    if (rest >= 0x7c00u)
        bits = sign | 0x7f800000u | (rest & 0x3ffu) << 13; /* infinity, NaN */
    else if (rest >= 0x400u)
        bits = sign | ((rest << 13) + 0x38000000u); /* normal: the exponent's bias grows by 112 */
    else
        bits = sign | opjit_bits_of_float((float)rest * 0x1p-24f); /* subnormal, exactly */
    return opjit_float_of_bits(bits);
#endif
}

/*
 * The bits of a float without its sign, rounded to a format with `dropped` fewer fraction bits and an exponent bias
 * that is smaller by `bias`. From the bits of `limit` on, the result is `largest`.
 */
OPJIT_HOST_DEVICE uint32_t opjit_narrowed(uint32_t bits, uint32_t bias, uint32_t dropped, uint32_t limit,
                                          uint32_t largest, uint32_t nan)
{
    const uint32_t rest = bits & 0x7fffffffu;
    if (rest >= limit)
        return rest > 0x7f800000u ? nan : largest;
    if (rest >= (bias + 1) << 23) /* normal */
        return (rest - (bias << 23) + (1u << (dropped - 1)) - 1 + (rest >> dropped & 1u)) >> dropped;
    const uint32_t rounder = (bias + dropped + 1) << 23; /* subnormal: adding this power of two rounds the last bits */
    return opjit_bits_of_float(opjit_float_of_bits(rest) + opjit_float_of_bits(rounder)) - rounder;
}

OPJIT_HOST_DEVICE opjit_half opjit_float_to_half(float value)
{
    opjit_half result;
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
#elif defined(__F16C__)
    typedef float opjit_floats_ __attribute__((vector_size(16)));
    typedef long long opjit_words_ __attribute__((vector_size(16)));
    const opjit_floats_ number = {value, 0, 0, 0};
    result.bits = (uint16_t)((opjit_words_)__builtin_ia32_vcvtps2ph(number, 0))[0]; /* 0: to nearest, ties to even */
#elif defined(__aarch64__) && !defined(__CUDACC__)
    const __fp16 half = value;
    memcpy(&result, &half, sizeof half);
#else
    const uint32_t bits = opjit_bits_of_float(value); /* 65520 and more round to infinity */
    result.bits = (uint16_t)((bits >> 16 & 0x8000u) | opjit_narrowed(bits, 112, 13, 0x477ff000u, 0x7c00u, 0x7e00u));
#endif
    return result;
}

/* 1 sign, 4 exponent, 3 fraction bits: up to 448. Larger numbers and infinity become 448, like in torch >= 2.13. */
OPJIT_HOST_DEVICE float opjit_float8_e4m3fn_to_float(opjit_float8_e4m3fn value)
{
    uint32_t sign = (uint32_t)(value.bits & 0x80u) << 24, rest = value.bits & 0x7fu;
    uint32_t bits;
    if (rest == 0x7fu)
        bits = 0x7fc00000u; /* NaN */
    else if (rest >= 8u)
        bits = (rest << 20) + 0x3c000000u; /* normal: the exponent's bias grows by 120 */
    else
        bits = opjit_bits_of_float((float)rest * 0x1p-9f); /* subnormal, exactly */
    return opjit_float_of_bits(sign | bits);
}

OPJIT_HOST_DEVICE opjit_float8_e4m3fn opjit_float_to_float8_e4m3fn(float value)
{
    const uint32_t bits = opjit_bits_of_float(value);
    const opjit_float8_e4m3fn result = {
        (uint8_t)((bits >> 24 & 0x80u) | opjit_narrowed(bits, 120, 20, 0x43e00000u, 0x7eu, 0x7fu))};
    return result;
}

/* 1 sign, 5 exponent and 2 fraction bits: the upper half of a float16. */
OPJIT_HOST_DEVICE float opjit_float8_e5m2_to_float(opjit_float8_e5m2 value)
{
    const opjit_half half = {(uint16_t)(value.bits << 8)};
    return opjit_half_to_float(half);
}

OPJIT_HOST_DEVICE opjit_float8_e5m2 opjit_float_to_float8_e5m2(float value)
{
    const uint32_t bits = opjit_bits_of_float(value); /* 61440 and more round to infinity */
    const opjit_float8_e5m2 result = {
        (uint8_t)((bits >> 24 & 0x80u) | opjit_narrowed(bits, 112, 21, 0x47700000u, 0x7cu, 0x7fu))};
    return result;
}

/*
 * Load an element of any floating dtype as a number to compute with, and store it. For example,
 * opjit_store(to, 2 * opjit_load(from)). In C++ these are overloaded functions. In C, they choose by the type of the
 * pointer.
 */
#ifdef __cplusplus
#define OPJIT_OVERLOAD(name_, type_) name_
#else
#define OPJIT_OVERLOAD(name_, type_) name_##_at_##type_
#define opjit_load(from_) \
    _Generic(*(from_), \
        opjit_float8_e4m3fn: opjit_load_at_opjit_float8_e4m3fn, \
        opjit_float8_e5m2: opjit_load_at_opjit_float8_e5m2, \
        opjit_half: opjit_load_at_opjit_half, \
        opjit_bfloat16: opjit_load_at_opjit_bfloat16, \
        float: opjit_load_at_float, \
        double: opjit_load_at_double)(from_)
#define opjit_store(to_, value_) \
    _Generic(*(to_), \
        opjit_float8_e4m3fn: opjit_store_at_opjit_float8_e4m3fn, \
        opjit_float8_e5m2: opjit_store_at_opjit_float8_e5m2, \
        opjit_half: opjit_store_at_opjit_half, \
        opjit_bfloat16: opjit_store_at_opjit_bfloat16, \
        float: opjit_store_at_float, \
        double: opjit_store_at_double)((to_), (value_))
#endif

#define OPJIT_LOAD_AND_STORE(type_, number_, load_, store_) \
    OPJIT_HOST_DEVICE number_ OPJIT_OVERLOAD(opjit_load, type_)(const type_ *from) \
    { \
        return load_(*from); \
    } \
    OPJIT_HOST_DEVICE void OPJIT_OVERLOAD(opjit_store, type_)(type_ * to, number_ value) \
    { \
        *to = store_(value); \
    }

OPJIT_LOAD_AND_STORE(opjit_float8_e4m3fn, float, opjit_float8_e4m3fn_to_float, opjit_float_to_float8_e4m3fn)
OPJIT_LOAD_AND_STORE(opjit_float8_e5m2, float, opjit_float8_e5m2_to_float, opjit_float_to_float8_e5m2)
OPJIT_LOAD_AND_STORE(opjit_half, float, opjit_half_to_float, opjit_float_to_half)
OPJIT_LOAD_AND_STORE(opjit_bfloat16, float, opjit_bfloat16_to_float, opjit_float_to_bfloat16)
OPJIT_LOAD_AND_STORE(float, float, , )
OPJIT_LOAD_AND_STORE(double, double, , )

#endif
