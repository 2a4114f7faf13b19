/*
 * intrinsics.h - CUDA's arithmetic on the CPU. libm computes functions that a GPU approximates (__expf, rsqrtf), so
 * their last bits differ. LIMITS.md lists the differences.
 */
#ifndef OPJIT_EMULATE_INTRINSICS_H
#define OPJIT_EMULATE_INTRINSICS_H

#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <utility>

#include "language.h"

using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;
using std::signbit;

/* ---------------------------------------------------------------------------------------------- */
/* Comparisons of two types, which std:: lacks                                                    */

template <typename a, typename b>
using emu_common =
    std::enable_if_t<std::is_arithmetic<a>::value && std::is_arithmetic<b>::value && !std::is_same<a, b>::value,
                     std::common_type_t<a, b>>;

template <typename a, typename b>
EMU_OWN constexpr emu_common<a, b> max(a x, b y)
{
    typedef std::common_type_t<a, b> both;
    return (both)x > (both)y ? (both)x : (both)y;
}

template <typename a, typename b>
EMU_OWN constexpr emu_common<a, b> min(a x, b y)
{
    typedef std::common_type_t<a, b> both;
    return (both)x < (both)y ? (both)x : (both)y;
}

#define EMU_MIN_MAX(type_, min_, max_) \
    EMU_OWN static type_ min_(type_ x, type_ y) \
    { \
        return x < y ? x : y; \
    } \
    EMU_OWN static type_ max_(type_ x, type_ y) \
    { \
        return x > y ? x : y; \
    }
EMU_MIN_MAX(unsigned, umin, umax)
EMU_MIN_MAX(long long, llmin, llmax)
EMU_MIN_MAX(unsigned long long, ullmin, ullmax)

/* ---------------------------------------------------------------------------------------------- */
/* Functions of one or two numbers                                                                */

/* glibc declares these names for itself. */
#define __expf emu_expf
#define __logf emu_logf
#define __log2f emu_log2f
#define __log10f emu_log10f
#define __exp10f emu_exp10f
#define __sinf emu_sinf
#define __cosf emu_cosf
#define __tanf emu_tanf
#define __powf emu_powf
#define __sincosf emu_sincosf
#define __tanhf emu_tanhf

#define EMU_OF_ONE(type_, name_, expression_) \
    EMU_OWN static type_ name_(type_ x) \
    { \
        return expression_; \
    }
#if !__GLIBC_PREREQ(2, 42) /* it has C23's rsqrt */
EMU_OF_ONE(float, rsqrtf, 1.0f / sqrtf(x))
EMU_OF_ONE(double, rsqrt, 1.0 / sqrt(x))
#endif
EMU_OF_ONE(float, rsqrt, 1.0f / sqrtf(x))
EMU_OF_ONE(float, rcbrtf, 1.0f / cbrtf(x))
EMU_OF_ONE(float, __expf, expf(x))
EMU_OF_ONE(float, __logf, logf(x))
EMU_OF_ONE(float, __log2f, log2f(x))
EMU_OF_ONE(float, __log10f, log10f(x))
EMU_OF_ONE(float, __exp10f, powf(10.0f, x))
EMU_OF_ONE(float, __sinf, sinf(x))
EMU_OF_ONE(float, __cosf, cosf(x))
EMU_OF_ONE(float, __tanf, tanf(x))
EMU_OF_ONE(float, __tanhf, tanhf(x))
EMU_OF_ONE(float, __saturatef, x > 0 ? x < 1 ? x : 1 : 0)
EMU_OF_ONE(float, __frcp_rn, 1.0f / x)
EMU_OF_ONE(float, __fsqrt_rn, sqrtf(x))
EMU_OF_ONE(float, __frsqrt_rn, 1.0f / sqrtf(x))
EMU_OF_ONE(double, __drcp_rn, 1.0 / x)
EMU_OF_ONE(double, __dsqrt_rn, sqrt(x))
#if !__GLIBC_PREREQ(2, 41) /* it has C23's sinpi and cospi */
EMU_OF_ONE(float, sinpif, sinf(3.14159265358979f * x))
EMU_OF_ONE(float, cospif, cosf(3.14159265358979f * x))
EMU_OF_ONE(double, sinpi, sin(3.14159265358979323846 * x))
EMU_OF_ONE(double, cospi, cos(3.14159265358979323846 * x))
#endif
EMU_OF_ONE(float, normcdff, 0.5f * erfcf(-0.70710678118654752f * x))
EMU_OF_ONE(double, normcdf, 0.5 * erfc(-0.70710678118654752 * x))

#define EMU_OF_TWO(type_, name_, expression_) \
    EMU_OWN static type_ name_(type_ x, type_ y) \
    { \
        return expression_; \
    }
EMU_OF_TWO(float, __powf, powf(x, y))
EMU_OF_TWO(float, fdividef, x / y)
EMU_OF_TWO(float, __fdividef, x / y)
EMU_OF_TWO(float, __fdiv_rn, x / y)
EMU_OF_TWO(double, __ddiv_rn, x / y)
EMU_OF_TWO(float, rhypotf, 1.0f / hypotf(x, y))

/* Sums and products that the compiler must not fuse. */
#define EMU_UNFUSED(type_, name_, operator_) \
    __attribute__((optimize("fp-contract=off"), noinline)) EMU_OWN static type_ name_(type_ x, type_ y) \
    { \
        return x operator_ y; \
    }
EMU_UNFUSED(float, __fadd_rn, +)
EMU_UNFUSED(float, __fsub_rn, -)
EMU_UNFUSED(float, __fmul_rn, *)
EMU_UNFUSED(double, __dadd_rn, +)
EMU_UNFUSED(double, __dsub_rn, -)
EMU_UNFUSED(double, __dmul_rn, *)

EMU_OWN static float __fmaf_rn(float x, float y, float z)
{
    return fmaf(x, y, z);
}

EMU_OWN static double __fma_rn(double x, double y, double z)
{
    return fma(x, y, z);
}

EMU_OWN static float rnorm3df(float x, float y, float z)
{
    return 1.0f / sqrtf(x * x + y * y + z * z);
}

EMU_OWN static float norm3df(float x, float y, float z)
{
    return sqrtf(x * x + y * y + z * z);
}

EMU_OWN static void __sincosf(float x, float *sine, float *cosine)
{
    *sine = sinf(x);
    *cosine = cosf(x);
}

EMU_OWN static void sincospif(float x, float *sine, float *cosine)
{
    *sine = sinpif(x);
    *cosine = cospif(x);
}

/* ---------------------------------------------------------------------------------------------- */
/* Conversions                                                                                    */

template <typename to, typename from>
EMU_OWN to emu_bits(from value)
{
    static_assert(sizeof(to) == sizeof(from), "the bits of a value of another size");
    to bits;
    memcpy((void *)&bits, (const void *)&value, sizeof bits);
    return bits;
}

/* As the GPU: numbers beyond the range become its ends, NaN becomes 0. */
template <typename to, typename from>
EMU_OWN to emu_saturated(from value)
{
    if (value != value)
        return 0;
    if (value <= (from)std::numeric_limits<to>::min())
        return std::numeric_limits<to>::min();
    if (value >= (from)std::numeric_limits<to>::max())
        return std::numeric_limits<to>::max();
    return (to)value;
}

#define EMU_CONVERTS(name_, from_, to_, expression_) \
    EMU_OWN static to_ name_(from_ x) \
    { \
        return expression_; \
    }
EMU_CONVERTS(__float_as_int, float, int, emu_bits<int>(x))
EMU_CONVERTS(__int_as_float, int, float, emu_bits<float>(x))
EMU_CONVERTS(__float_as_uint, float, unsigned, emu_bits<unsigned>(x))
EMU_CONVERTS(__uint_as_float, unsigned, float, emu_bits<float>(x))
EMU_CONVERTS(__double_as_longlong, double, long long, emu_bits<long long>(x))
EMU_CONVERTS(__longlong_as_double, long long, double, emu_bits<double>(x))
EMU_CONVERTS(__double2hiint, double, int, (int)(emu_bits<uint64_t>(x) >> 32))
EMU_CONVERTS(__double2loint, double, int, (int)emu_bits<uint64_t>(x))

#define EMU_CONVERTS_TO(suffix_, to_) \
    EMU_CONVERTS(__float2##suffix_##_rn, float, to_, emu_saturated<to_>(rintf(x))) \
    EMU_CONVERTS(__float2##suffix_##_rz, float, to_, emu_saturated<to_>(truncf(x))) \
    EMU_CONVERTS(__float2##suffix_##_rd, float, to_, emu_saturated<to_>(floorf(x))) \
    EMU_CONVERTS(__float2##suffix_##_ru, float, to_, emu_saturated<to_>(ceilf(x))) \
    EMU_CONVERTS(__double2##suffix_##_rn, double, to_, emu_saturated<to_>(rint(x))) \
    EMU_CONVERTS(__double2##suffix_##_rz, double, to_, emu_saturated<to_>(trunc(x))) \
    EMU_CONVERTS(__##suffix_##2float_rn, to_, float, (float)x) \
    EMU_CONVERTS(__##suffix_##2double_rn, to_, double, (double)x)
EMU_CONVERTS_TO(int, int)
EMU_CONVERTS_TO(uint, unsigned)
EMU_CONVERTS_TO(ll, long long)
EMU_CONVERTS_TO(ull, unsigned long long)
EMU_CONVERTS(__double2float_rn, double, float, (float)x)

/* ---------------------------------------------------------------------------------------------- */
/* Integers                                                                                       */

EMU_CONVERTS(__popc, unsigned, int, __builtin_popcount(x))
EMU_CONVERTS(__popcll, unsigned long long, int, __builtin_popcountll(x))
EMU_CONVERTS(__clz, int, int, x ? __builtin_clz((unsigned)x) : 32)
EMU_CONVERTS(__clzll, long long, int, x ? __builtin_clzll((unsigned long long)x) : 64)
EMU_CONVERTS(__ffs, int, int, __builtin_ffs(x))
EMU_CONVERTS(__ffsll, long long, int, __builtin_ffsll(x))

EMU_OWN static unsigned __brev(unsigned x)
{
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; bit++)
        reversed |= (x >> bit & 1) << (31 - bit);
    return reversed;
}

EMU_OWN static unsigned long long __brevll(unsigned long long x)
{
    return (unsigned long long)__brev((unsigned)x) << 32 | __brev((unsigned)(x >> 32));
}

#define EMU_INTEGERS(name_, type_, wide_, expression_) \
    EMU_OWN static type_ name_(type_ a, type_ b) \
    { \
        const wide_ x = a, y = b; \
        return (type_)(expression_); \
    }
EMU_INTEGERS(__mul24, int, int64_t, x *y)
EMU_INTEGERS(__umul24, unsigned, uint64_t, x *y)
EMU_INTEGERS(__mulhi, int, int64_t, x *y >> 32)
EMU_INTEGERS(__umulhi, unsigned, uint64_t, x *y >> 32)
EMU_INTEGERS(__mul64hi, long long, __int128, x *y >> 64)
EMU_INTEGERS(__umul64hi, unsigned long long, unsigned __int128, x *y >> 64)
EMU_INTEGERS(__hadd, int, int64_t, (x + y) >> 1)
EMU_INTEGERS(__rhadd, int, int64_t, (x + y + 1) >> 1)

EMU_OWN static unsigned __sad(int x, int y, unsigned z)
{
    return z + (unsigned)(x > y ? (int64_t)x - y : (int64_t)y - x);
}

EMU_OWN static unsigned __dp4a(unsigned a, unsigned b, unsigned sum)
{
    for (int bit = 0; bit < 32; bit += 8)
        sum += (a >> bit & 255) * (b >> bit & 255);
    return sum;
}

EMU_OWN static int __dp4a(int a, int b, int sum)
{
    for (int bit = 0; bit < 32; bit += 8)
        sum += (int)(int8_t)(a >> bit) * (int8_t)(b >> bit);
    return sum;
}

EMU_OWN static unsigned __byte_perm(unsigned a, unsigned b, unsigned selector)
{
    const uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned found = 0;
    for (int i = 0; i < 4; i++)
        found |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return found;
}

EMU_OWN static unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by)
{
    return (unsigned)((((uint64_t)high << 32 | low) << (by & 31)) >> 32);
}

EMU_OWN static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by)
{
    return (unsigned)(((uint64_t)high << 32 | low) >> (by & 31));
}

/* ---------------------------------------------------------------------------------------------- */
/* math_constants.h                                                                               */

#define CUDART_INF_F __builtin_inff()
#define CUDART_NAN_F __builtin_nanf("")
#define CUDART_INF __builtin_inf()
#define CUDART_NAN __builtin_nan("")
#define CUDART_PI_F 3.141592654f
#define CUDART_PI 3.1415926535897931e+0
#define CUDART_SQRT_TWO_F 1.414213562f
#define CUDART_L2E_F 1.442695041f
#define CUDART_LN2_F 0.693147181f
#define CUDART_MAX_NORMAL_F 3.402823466e38f

#endif
