/*
 * opjit_convert.h - convert elements from one real dtype to another, like Tensor.to().
 *
 *     #include "opjit_convert.h"
 *
 *     float row[100];
 *     opjit_convert(100, x->data, x->dtype, x->strides[0], row, OPJIT_FLOAT32);
 *
 * opjit_convert() converts a row. The other functions convert one element and check its dtype each time, which costs
 * about a nanosecond on the CPU. CUDA kernels can also call them:
 *
 *     opjit_store_float(to, i, out->dtype, 2 * opjit_load_float(from, i, x->dtype));
 *
 * Integers wrap around. A floating number loses its fraction when it becomes an integer. If it doesn't fit, the result
 * depends on the CPU. Any number except 0 becomes true.
 */
#ifndef OPJIT_CONVERT_H
#define OPJIT_CONVERT_H

#include "opjit.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Convert n elements that are `stride` elements apart, and write them contiguously. The output must not overlap the
 * row. If both dtypes are equal, this copies. Only then, the dtype may be complex. The byte of a bool must be 0 or 1.
 */
void opjit_convert(int64_t n, const void *from, opjit_dtype from_dtype, int64_t stride, void *to, opjit_dtype to_dtype);

/* Return whether opjit_convert() copies: one dtype, or integers of one size. */
OPJIT_INLINE bool opjit_has_same_bits(opjit_dtype from, opjit_dtype to)
{
    const bool integers = opjit_is_integral(from) && opjit_is_integral(to) && to != OPJIT_BOOL;
    return from == to || (integers && opjit_dtype_size(from) == opjit_dtype_size(to));
}

/*
 * Convert eight contiguous elements from float16, and to it. In a loop over opjit_half_to_float(), gcc converts the
 * elements one by one.
 */
OPJIT_INLINE void opjit_load_halves(const opjit_half *from, float *to)
{
#ifdef __F16C__
    typedef short opjit_halfs_ __attribute__((vector_size(16)));
    typedef float opjit_floats_ __attribute__((vector_size(32)));
    opjit_halfs_ halfs;
    memcpy(&halfs, from, sizeof halfs);
    const opjit_floats_ floats = __builtin_ia32_vcvtph2ps256(halfs);
    memcpy(to, &floats, sizeof floats);
#else
    for (int i = 0; i < 8; i++)
        to[i] = opjit_half_to_float(from[i]);
#endif
}

OPJIT_INLINE void opjit_store_halves(opjit_half *to, const float *from)
{
#ifdef __F16C__
    typedef short opjit_halfs_ __attribute__((vector_size(16)));
    typedef float opjit_floats_ __attribute__((vector_size(32)));
    opjit_floats_ floats;
    memcpy(&floats, from, sizeof floats);
    const opjit_halfs_ halfs = __builtin_ia32_vcvtps2ph256(floats, 0); /* 0: to nearest, ties to even */
    memcpy(to, &halfs, sizeof halfs);
#elif defined(__aarch64__) && !defined(__CUDACC__)
    typedef short opjit_halfs_ __attribute__((vector_size(16)));
    typedef float opjit_floats_ __attribute__((vector_size(16)));
    opjit_floats_ lower, upper;
    opjit_halfs_ halfs;
    memcpy(&lower, from, sizeof lower);
    memcpy(&upper, from + 4, sizeof upper);
    __asm__("fcvtn %0.4h, %1.4s\n\tfcvtn2 %0.8h, %2.4s" : "=&w"(halfs) : "w"(lower), "w"(upper));
    memcpy(to, &halfs, sizeof halfs);
#else
    for (int i = 0; i < 8; i++)
        to[i] = opjit_float_to_half(from[i]);
#endif
}

/* Element i of a bool or integer dtype; uint64 wraps around. */
OPJIT_HOST_DEVICE int64_t opjit_load_int64(const void *data, int64_t i, opjit_dtype dtype)
{
    switch (dtype) {
        OPJIT_CASE(OPJIT_BOOL, uint8_t, { return ((const scalar_t *)data)[i]; })
        OPJIT_CASES_INTEGRAL({ return (int64_t)((const scalar_t *)data)[i]; })
    default: return 0;
    }
}

/* Element i of any real dtype, rounded once. */
#define OPJIT_LOAD_REAL_(name_, real_) \
    OPJIT_HOST_DEVICE real_ name_(const void *data, int64_t i, opjit_dtype dtype) \
    { \
        switch (dtype) { \
            OPJIT_CASE(OPJIT_BOOL, uint8_t, { return (real_)((const scalar_t *)data)[i]; }) \
            OPJIT_CASES_INTEGRAL({ return (real_)((const scalar_t *)data)[i]; }) \
            OPJIT_CASES_FLOATING({ return (real_)((const scalar_t *)data)[i]; }) \
            OPJIT_CASES_FLOAT8({ return (real_)opjit_load((const scalar_t *)data + i); }) \
            OPJIT_CASE(OPJIT_FLOAT16, opjit_half, { return (real_)opjit_half_to_float(((const scalar_t *)data)[i]); }) \
            OPJIT_CASE(OPJIT_BFLOAT16, opjit_bfloat16, \
                       { return (real_)opjit_bfloat16_to_float(((const scalar_t *)data)[i]); }) \
        default: return 0; \
        } \
    }
OPJIT_LOAD_REAL_(opjit_load_float, float)
OPJIT_LOAD_REAL_(opjit_load_double, double)

/* Store element i of a bool or integer dtype. */
OPJIT_HOST_DEVICE void opjit_store_int64(void *data, int64_t i, opjit_dtype dtype, int64_t value)
{
    switch (dtype) {
        OPJIT_CASE(OPJIT_BOOL, uint8_t, { ((scalar_t *)data)[i] = value != 0; })
        OPJIT_CASES_INTEGRAL({ ((scalar_t *)data)[i] = (scalar_t)value; })
    default: break;
    }
}

/* Store element i of a floating or float8 dtype. */
OPJIT_HOST_DEVICE void opjit_store_float(void *data, int64_t i, opjit_dtype dtype, float value)
{
    switch (dtype) {
        OPJIT_CASES_FLOATING({ ((scalar_t *)data)[i] = (scalar_t)value; })
        OPJIT_CASES_FLOAT8({ opjit_store((scalar_t *)data + i, value); })
        OPJIT_CASE(OPJIT_FLOAT16, opjit_half, { ((scalar_t *)data)[i] = opjit_float_to_half(value); })
        OPJIT_CASE(OPJIT_BFLOAT16, opjit_bfloat16, { ((scalar_t *)data)[i] = opjit_float_to_bfloat16(value); })
    default: break;
    }
}

/* Convert a floating number to the argument of opjit_store_int64(). */
OPJIT_HOST_DEVICE int64_t opjit_integer_of(double value, opjit_dtype dtype)
{
    if (dtype == OPJIT_BOOL)
        return value != 0;
#ifdef __CUDA_ARCH__
    return dtype == OPJIT_UINT64 ? (int64_t)(uint64_t)value : (int64_t)value;
#else
    /* C doesn't define casts that don't fit. x86 returns the lowest one. torch casts to int32 up to that width. */
    const double limit = dtype >= OPJIT_INT8 && dtype <= OPJIT_INT32 ? 0x1p31 : 0x1p63;
    if (dtype == OPJIT_UINT64 && value >= 0x1p63 && value < 0x1p64)
        return (int64_t)(value - 0x1p63) + INT64_MIN;
    return value >= -limit && value < limit ? (int64_t)value : (int64_t)-limit;
#endif
}

#ifdef __cplusplus
}
#endif

#endif
