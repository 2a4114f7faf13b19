/*
 * half.h - __half, __nv_bfloat16, float8 and their pairs, over the conversions of opjit_half.h. Each operation
 * computes in float and rounds the result, like the instruction of a GPU.
 */
#ifndef OPJIT_EMULATE_HALF_H
#define OPJIT_EMULATE_HALF_H

#include "../opjit_half.h"
#include "intrinsics.h"

/* A number of two bytes and a pair of them. The conversions accept `raw_`, the storage type of opjit_half.h. */
#define EMU_NARROW(name_, pair_, raw_, to_float_, of_float_) \
    struct alignas(2) name_ { \
        raw_ raw; \
        name_() = default; \
        name_(float x) : raw(of_float_(x)) {} \
        name_(double x) : raw(of_float_((float)x)) {} \
        name_(int x) : raw(of_float_((float)x)) {} \
        name_(unsigned x) : raw(of_float_((float)x)) {} \
        name_(long x) : raw(of_float_((float)x)) {} \
        name_(long long x) : raw(of_float_((float)x)) {} \
        operator float() const { return to_float_(raw); } \
        name_ &operator+=(name_ y) { return *this = name_(float(*this) + float(y)); } \
        name_ &operator-=(name_ y) { return *this = name_(float(*this) - float(y)); } \
        name_ &operator*=(name_ y) { return *this = name_(float(*this) * float(y)); } \
        name_ &operator/=(name_ y) { return *this = name_(float(*this) / float(y)); } \
    }; \
    EMU_OWN static name_ operator+(name_ x, name_ y) \
    { \
        return name_(float(x) + float(y)); \
    } \
    EMU_OWN static name_ operator-(name_ x, name_ y) \
    { \
        return name_(float(x) - float(y)); \
    } \
    EMU_OWN static name_ operator*(name_ x, name_ y) \
    { \
        return name_(float(x) * float(y)); \
    } \
    EMU_OWN static name_ operator/(name_ x, name_ y) \
    { \
        return name_(float(x) / float(y)); \
    } \
    EMU_OWN static name_ operator-(name_ x) \
    { \
        return name_(-float(x)); \
    } \
    EMU_OWN static bool operator<(name_ x, name_ y) \
    { \
        return float(x) < float(y); \
    } \
    EMU_OWN static bool operator>(name_ x, name_ y) \
    { \
        return float(x) > float(y); \
    } \
    EMU_OWN static bool operator<=(name_ x, name_ y) \
    { \
        return float(x) <= float(y); \
    } \
    EMU_OWN static bool operator>=(name_ x, name_ y) \
    { \
        return float(x) >= float(y); \
    } \
    EMU_OWN static bool operator==(name_ x, name_ y) \
    { \
        return float(x) == float(y); \
    } \
    EMU_OWN static bool operator!=(name_ x, name_ y) \
    { \
        return float(x) != float(y); \
    } \
    struct alignas(4) pair_ { \
        name_ x, y; \
    }; \
    EMU_OWN static pair_ operator+(pair_ a, pair_ b) \
    { \
        return {a.x + b.x, a.y + b.y}; \
    } \
    EMU_OWN static pair_ operator-(pair_ a, pair_ b) \
    { \
        return {a.x - b.x, a.y - b.y}; \
    } \
    EMU_OWN static pair_ operator*(pair_ a, pair_ b) \
    { \
        return {a.x * b.x, a.y * b.y}; \
    } \
    EMU_OWN static pair_ operator/(pair_ a, pair_ b) \
    { \
        return {a.x / b.x, a.y / b.y}; \
    } \
    EMU_OWN static pair_ &operator+=(pair_ &a, pair_ b) \
    { \
        return a = a + b; \
    } \
    EMU_OWN static pair_ &operator*=(pair_ &a, pair_ b) \
    { \
        return a = a * b; \
    } \
    EMU_OWN static name_ __hadd(name_ x, name_ y) \
    { \
        return x + y; \
    } \
    EMU_OWN static name_ __hsub(name_ x, name_ y) \
    { \
        return x - y; \
    } \
    EMU_OWN static name_ __hmul(name_ x, name_ y) \
    { \
        return x * y; \
    } \
    EMU_OWN static name_ __hdiv(name_ x, name_ y) \
    { \
        return x / y; \
    } \
    EMU_OWN static name_ __hneg(name_ x) \
    { \
        return -x; \
    } \
    EMU_OWN static name_ __habs(name_ x) \
    { \
        return name_(fabsf(x)); \
    } \
    EMU_OWN static name_ __hmax(name_ x, name_ y) \
    { \
        return name_(fmaxf(x, y)); \
    } \
    EMU_OWN static name_ __hmin(name_ x, name_ y) \
    { \
        return name_(fminf(x, y)); \
    } \
    EMU_OWN static name_ __hfma(name_ x, name_ y, name_ z) \
    { \
        return name_(fmaf(x, y, z)); \
    } \
    EMU_OWN static bool __hlt(name_ x, name_ y) \
    { \
        return x < y; \
    } \
    EMU_OWN static bool __hgt(name_ x, name_ y) \
    { \
        return x > y; \
    } \
    EMU_OWN static bool __hle(name_ x, name_ y) \
    { \
        return x <= y; \
    } \
    EMU_OWN static bool __hge(name_ x, name_ y) \
    { \
        return x >= y; \
    } \
    EMU_OWN static bool __heq(name_ x, name_ y) \
    { \
        return x == y; \
    } \
    EMU_OWN static bool __hne(name_ x, name_ y) \
    { \
        return x != y; \
    } \
    EMU_OWN static bool __hisnan(name_ x) \
    { \
        return x != x; \
    } \
    EMU_OWN static name_ hexp(name_ x) \
    { \
        return name_(expf(x)); \
    } \
    EMU_OWN static name_ hlog(name_ x) \
    { \
        return name_(logf(x)); \
    } \
    EMU_OWN static name_ hsqrt(name_ x) \
    { \
        return name_(sqrtf(x)); \
    } \
    EMU_OWN static name_ hrsqrt(name_ x) \
    { \
        return name_(1.0f / sqrtf(x)); \
    } \
    EMU_OWN static name_ hrcp(name_ x) \
    { \
        return name_(1.0f / float(x)); \
    } \
    EMU_OWN static name_ htanh(name_ x) \
    { \
        return name_(tanhf(x)); \
    } \
    EMU_OWN static name_ hsin(name_ x) \
    { \
        return name_(sinf(x)); \
    } \
    EMU_OWN static name_ hcos(name_ x) \
    { \
        return name_(cosf(x)); \
    } \
    EMU_OWN static pair_ __hadd2(pair_ x, pair_ y) \
    { \
        return x + y; \
    } \
    EMU_OWN static pair_ __hsub2(pair_ x, pair_ y) \
    { \
        return x - y; \
    } \
    EMU_OWN static pair_ __hmul2(pair_ x, pair_ y) \
    { \
        return x * y; \
    } \
    EMU_OWN static pair_ __h2div(pair_ x, pair_ y) \
    { \
        return x / y; \
    } \
    EMU_OWN static pair_ __hmax2(pair_ a, pair_ b) \
    { \
        return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; \
    } \
    EMU_OWN static pair_ __hmin2(pair_ a, pair_ b) \
    { \
        return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; \
    } \
    EMU_OWN static pair_ __hfma2(pair_ a, pair_ b, pair_ c) \
    { \
        return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; \
    }

EMU_NARROW(__half, __half2, opjit_half, opjit_half_to_float, opjit_float_to_half)
EMU_NARROW(__nv_bfloat16, __nv_bfloat162, opjit_bfloat16, opjit_bfloat16_to_float, opjit_float_to_bfloat16)
typedef __half half;
typedef __half2 half2;
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

/* The conversions by name. */
#define EMU_NAMED(name_, pair_, half_, halves_) \
    EMU_OWN static float __##half_##2float(name_ x) \
    { \
        return x; \
    } \
    EMU_OWN static name_ __float2##half_(float x) \
    { \
        return x; \
    } \
    EMU_OWN static name_ __float2##half_##_rn(float x) \
    { \
        return x; \
    } \
    EMU_OWN static name_ __double2##half_(double x) \
    { \
        return x; \
    } \
    EMU_OWN static name_ __int2##half_##_rn(int x) \
    { \
        return x; \
    } \
    EMU_OWN static int __##half_##2int_rn(name_ x) \
    { \
        return __float2int_rn(x); \
    } \
    EMU_OWN static int __##half_##2int_rz(name_ x) \
    { \
        return __float2int_rz(x); \
    } \
    EMU_OWN static pair_ __float2##half_##2_rn(float x) \
    { \
        return {x, x}; \
    } \
    EMU_OWN static pair_ __floats2##half_##2_rn(float x, float y) \
    { \
        return {x, y}; \
    } \
    EMU_OWN static pair_ __float22##half_##2_rn(float2 v) \
    { \
        return {v.x, v.y}; \
    } \
    EMU_OWN static float2 __##half_##22float2(pair_ v) \
    { \
        return {v.x, v.y}; \
    } \
    EMU_OWN static pair_ __##half_##2##half_##2(name_ x) \
    { \
        return {x, x}; \
    } \
    EMU_OWN static pair_ __##halves_##2##half_##2(name_ x, name_ y) \
    { \
        return {x, y}; \
    } \
    EMU_OWN static name_ __low2##half_(pair_ v) \
    { \
        return v.x; \
    } \
    EMU_OWN static name_ __high2##half_(pair_ v) \
    { \
        return v.y; \
    } \
    EMU_OWN static unsigned short __##half_##_as_ushort(name_ x) \
    { \
        return x.raw.bits; \
    } \
    EMU_OWN static short __##half_##_as_short(name_ x) \
    { \
        return (short)x.raw.bits; \
    } \
    EMU_OWN static name_ __ushort_as_##half_(unsigned short x) \
    { \
        return emu_bits<name_>(x); \
    } \
    EMU_OWN static name_ __short_as_##half_(short x) \
    { \
        return emu_bits<name_>(x); \
    }
EMU_NAMED(__half, __half2, half, halves)
EMU_NAMED(__nv_bfloat16, __nv_bfloat162, bfloat16, halves)

EMU_OWN static float __low2float(__half2 v)
{
    return v.x;
}

EMU_OWN static float __high2float(__half2 v)
{
    return v.y;
}

EMU_OWN static __half2 make_half2(__half x, __half y)
{
    return {x, y};
}

#define EMU_FLOAT8(name_, raw_, to_float_, of_float_) \
    struct name_ { \
        raw_ raw; \
        name_() = default; \
        explicit name_(float x) : raw(of_float_(x)) {} \
        explicit operator float() const { return to_float_(raw); } \
    };
EMU_FLOAT8(__nv_fp8_e4m3, opjit_float8_e4m3fn, opjit_float8_e4m3fn_to_float, opjit_float_to_float8_e4m3fn)
EMU_FLOAT8(__nv_fp8_e5m2, opjit_float8_e5m2, opjit_float8_e5m2_to_float, opjit_float_to_float8_e5m2)

#endif
