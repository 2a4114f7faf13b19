/*
 * opjit_device.h - what kernels see of torch's headers, and of C++'s, when NVRTC compiles them.
 *
 * Kernels use numbers: c10::Half and c10::BFloat16, accessors, limits, min and max. Tensors, which functions of the
 * host declare and use, are names here. NVRTC lacks the headers of C++, and compiling libcu++'s <limits> and
 * <type_traits> costs a second. These few definitions cost almost nothing.
 */
#pragma once

#include <cassert>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>

#define __builtin_clz(x) __clz(x)
#define UINT16_C(x) x

namespace std
{

using ::int16_t;
using ::int32_t;
using ::int64_t;
using ::int8_t;
using ::ptrdiff_t;
using ::size_t;
using ::uint16_t;
using ::uint32_t;
using ::uint64_t;
using ::uint8_t;
using nullptr_t = decltype(nullptr);

inline void *memcpy(void *to, const void *from, size_t size)
{
    return ::memcpy(to, from, size);
}

template <typename T>
constexpr const T &min(const T &a, const T &b)
{
    return b < a ? b : a;
}

template <typename T>
constexpr const T &max(const T &a, const T &b)
{
    return a < b ? b : a;
}

/* --- type_traits -------------------------------------------------------------------------------------------------------------------- */

template <typename T, T number>
struct integral_constant {
    static constexpr T value = number;
    using type = integral_constant;
    constexpr operator T() const { return number; }
};
template <bool condition>
using bool_constant = integral_constant<bool, condition>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <typename T, typename U>
struct is_same : false_type {
};
template <typename T>
struct is_same<T, T> : true_type {
};
template <typename T, typename U>
constexpr bool is_same_v = is_same<T, U>::value;

template <bool condition, typename T = void>
struct enable_if {
};
template <typename T>
struct enable_if<true, T> {
    using type = T;
};
template <bool condition, typename T = void>
using enable_if_t = typename enable_if<condition, T>::type;

template <bool condition, typename T, typename U>
struct conditional {
    using type = T;
};
template <typename T, typename U>
struct conditional<false, T, U> {
    using type = U;
};
template <bool condition, typename T, typename U>
using conditional_t = typename conditional<condition, T, U>::type;

template <size_t size, size_t alignment>
struct aligned_storage {
    struct type {
        alignas(alignment) unsigned char bytes[size];
    };
};

#define OPJIT_WITHOUT(trait, pattern) \
    template <typename T> \
    struct trait { \
        using type = T; \
    }; \
    template <typename T> \
    struct trait<pattern> { \
        using type = T; \
    }; \
    template <typename T> \
    using trait##_t = typename trait<T>::type
OPJIT_WITHOUT(remove_const, const T);
OPJIT_WITHOUT(remove_volatile, volatile T);
OPJIT_WITHOUT(remove_pointer, T *);
#undef OPJIT_WITHOUT
template <typename T>
using remove_cv_t = remove_const_t<remove_volatile_t<T>>;
template <typename T>
struct remove_reference {
    using type = T;
};
template <typename T>
struct remove_reference<T &> {
    using type = T;
};
template <typename T>
struct remove_reference<T &&> {
    using type = T;
};
template <typename T>
using remove_reference_t = typename remove_reference<T>::type;
template <typename T>
using decay_t = remove_cv_t<remove_reference_t<T>>; /* of what kernels pass: no arrays or functions */

template <typename T, typename... one_of>
constexpr bool opjit_is_one_of = (is_same_v<remove_cv_t<T>, one_of> || ...);
template <typename T>
constexpr bool is_floating_point_v = opjit_is_one_of<T, float, double>;
template <typename T>
constexpr bool is_integral_v = opjit_is_one_of<T, bool, char, signed char, unsigned char, short, unsigned short, int,
                                               unsigned int, long, unsigned long, long long, unsigned long long>;
template <typename T>
constexpr bool is_arithmetic_v = is_floating_point_v<T> || is_integral_v<T>;
template <typename T, bool = is_arithmetic_v<T>>
constexpr bool is_signed_v = T(-1) < T(0);
template <typename T>
constexpr bool is_signed_v<T, false> = false;
template <typename T>
constexpr bool is_trivially_copyable_v = __is_trivially_copyable(T);
template <typename T>
constexpr bool is_trivially_constructible_v = __is_trivially_constructible(T);
#define OPJIT_TRAIT(trait) \
    template <typename T> \
    struct trait : bool_constant<trait##_v<T>> { \
    }
OPJIT_TRAIT(is_floating_point);
OPJIT_TRAIT(is_integral);
OPJIT_TRAIT(is_arithmetic);
OPJIT_TRAIT(is_signed);
#undef OPJIT_TRAIT

/* --- math: numbers of two types become double, as in C++'s <cmath> --------------------------------------------------------------------- */

} // namespace std

#define OPJIT_MATH(name) \
    template <typename T, typename U, \
              typename = \
                  std::enable_if_t<std::is_arithmetic_v<T> && std::is_arithmetic_v<U> && !std::is_same_v<T, U>>> \
    inline double name(T a, U b) \
    { \
        return name(double(a), double(b)); \
    }
OPJIT_MATH(fmax);
OPJIT_MATH(fmin);
OPJIT_MATH(fmod);
OPJIT_MATH(hypot);
OPJIT_MATH(atan2);
OPJIT_MATH(copysign);
OPJIT_MATH(remainder);

/* NVRTC's pow of a float and an int is a float; C++'s is a double. */
inline float opjit_pow(float a, float b)
{
    return pow(a, b);
}
inline double opjit_pow(double a, double b)
{
    return pow(a, b);
}
OPJIT_MATH(opjit_pow);
template <typename T, typename = std::enable_if_t<std::is_integral_v<T>>>
inline double opjit_pow(T a, T b)
{
    return pow(double(a), double(b));
}
#define pow opjit_pow
#undef OPJIT_MATH

namespace std
{

using ::opjit_pow, ::abs, ::fabs, ::sqrt, ::cbrt, ::hypot, ::exp, ::exp2, ::expm1, ::log, ::log2, ::log10, ::log1p,
    ::sin, ::cos, ::tan, ::asin, ::acos, ::atan, ::atan2, ::sinh, ::cosh, ::tanh, ::asinh, ::acosh, ::atanh, ::erf,
    ::erfc, ::tgamma, ::lgamma, ::ceil, ::floor, ::trunc, ::round, ::nearbyint, ::rint, ::fmod, ::remainder, ::fma,
    ::fmin, ::fmax, ::fdim, ::copysign, ::isnan, ::isinf, ::isfinite, ::signbit;

/* --- limits: templates, because NVRTC puts the constants of other classes into each binary
 * -------------------------------------------- */

enum float_denorm_style { denorm_present = 1 };
enum float_round_style { round_to_nearest = 1 };

template <typename T, bool = is_integral_v<T>, bool = is_floating_point_v<T>>
struct opjit_limits {
    static constexpr bool is_specialized = false;
};

template <typename T>
struct opjit_limits<T, true, false> {
    static constexpr bool is_specialized = true, is_integer = true, is_signed = is_signed_v<T>;
    static constexpr bool has_infinity = false, has_quiet_NaN = false;
    static constexpr int digits = is_same_v<T, bool> ? 1 : 8 * sizeof(T) - is_signed;
    static constexpr T max() { return is_same_v<T, bool> ? T(1) : T(~0ULL >> (64 - digits)); }
    static constexpr T min() { return is_signed ? T(-max() - 1) : T(0); }
    static constexpr T lowest() { return min(); }
};

template <typename T>
struct opjit_limits<T, false, true> {
    static constexpr bool is_specialized = true, is_integer = false, is_signed = true;
    static constexpr bool has_infinity = true, has_quiet_NaN = true, has_denorm_loss = false;
    static constexpr bool traps = false, tinyness_before = false, is_float = sizeof(T) == sizeof(float);
    static constexpr float_denorm_style has_denorm = denorm_present;
    static constexpr float_round_style round_style = round_to_nearest;
    static constexpr int digits = is_float ? FLT_MANT_DIG : DBL_MANT_DIG, digits10 = is_float ? FLT_DIG : DBL_DIG;
    static constexpr T max() { return is_float ? FLT_MAX : DBL_MAX; }
    static constexpr T min() { return is_float ? FLT_MIN : DBL_MIN; }
    static constexpr T lowest() { return -max(); }
    static constexpr T epsilon() { return is_float ? FLT_EPSILON : DBL_EPSILON; }
    static constexpr T infinity() { return __builtin_bit_cast(float, 0x7f800000); }
    static constexpr T quiet_NaN() { return __builtin_bit_cast(float, 0x7fc00000); }
};

template <typename T>
class numeric_limits : public opjit_limits<T>
{
};

/* --- names for the host's functions ---------------------------------------------------------------------------------------------------- */

struct ostream {
    ostream &operator<<(double);
};
template <typename T>
struct allocator;
template <typename T, typename A = allocator<T>>
class vector;
template <typename T, size_t n>
struct array;
template <typename T>
class optional;
template <typename... T>
class tuple;
template <typename T, typename U>
struct pair;
template <typename T>
class function;

} // namespace std

#include <torch/headeronly/macros/Macros.h>

#ifdef OPJIT_HALVES
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
#endif

#ifdef OPJIT_ACCESSORS
#undef C10_HOST
#define C10_HOST
#define STD_TORCH_CHECK(...) ((void)0)
#define TORCH_CHECK_INDEX(...) ((void)0)
namespace std
{

template <typename T>
T *copy(const T *begin, const T *end, T *to)
{
    while (begin != end)
        *to++ = *begin++;
    return to;
}
template <typename T, size_t n>
T *begin(T (&array)[n])
{
    return array;
}
template <typename T>
void swap(T &a, T &b)
{
    T old = a;
    a = b;
    b = old;
}

} // namespace std
#endif

namespace torch::headeronly
{
template <typename T>
class HeaderOnlyArrayRef;
using IntHeaderOnlyArrayRef = HeaderOnlyArrayRef<int64_t>;
} // namespace torch::headeronly

namespace c10
{
class Scalar;
struct Device;
struct TensorOptions;
enum class ScalarType : int8_t;
template <typename T>
class ArrayRef;
using IntArrayRef = ArrayRef<int64_t>;
using std::optional;
namespace cuda
{
class CUDAStream;
} // namespace cuda
} // namespace c10

namespace at
{
using namespace c10;
class Tensor;
using TensorList = ArrayRef<Tensor>;
namespace cuda
{
using namespace c10::cuda;
} // namespace cuda
} // namespace at

namespace torch
{
using namespace at;
using at::Tensor;
namespace indexing
{
} // namespace indexing
} // namespace torch

#ifdef OPJIT_ACCESSORS
#include <ATen/core/TensorAccessor.h>
namespace torch
{
using at::PackedTensorAccessor32;
using at::PackedTensorAccessor64;
using at::RestrictPtrTraits;
} // namespace torch
#endif

#ifdef OPJIT_HALVES
namespace at
{
template <typename T>
struct OpMathType {
    using type = T;
};
template <>
struct OpMathType<c10::Half> {
    using type = float;
};
template <>
struct OpMathType<c10::BFloat16> {
    using type = float;
};
template <typename T>
using opmath_type = typename OpMathType<T>::type;
} // namespace at
#endif
