/*
 * opjit_complex.h - complex64 and complex128 with the same names in C and in CUDA C.
 *
 *     #include "opjit_complex.h"
 *
 *     OPJIT_DISPATCH_COMPLEX(x->dtype, "quarter_turn", {
 *         const scalar_t *from = (const scalar_t *)x->data;
 *         scalar_t *to = (scalar_t *)out->data;
 *         OPJIT_FOR_EACH(i, at, x)
 *             to[i] = OPJIT_COMPLEX(real_t, -opjit_imag(from[at]), opjit_real(from[at])) + from[at] * 2;
 *     });
 *
 * In C, these are the complex types of C. Kernels can't use a complex type of C++, so in CUDA these are structs with
 * the same operators: + - * / between two complex numbers of the same precision, or a complex and a real number.
 */
#ifndef OPJIT_COMPLEX_H
#define OPJIT_COMPLEX_H

#include "opjit.h"

#ifdef __cplusplus

template <typename real>
struct alignas(2 * sizeof(real)) opjit_complex_of {
    real re, im;
};

typedef opjit_complex_of<float> opjit_complex64;
typedef opjit_complex_of<double> opjit_complex128;

#define OPJIT_COMPLEX(real_, re_, im_) (opjit_complex_of<real_>{(real_)(re_), (real_)(im_)})

template <typename real>
OPJIT_HOST_DEVICE real opjit_real(opjit_complex_of<real> z)
{
    return z.re;
}

template <typename real>
OPJIT_HOST_DEVICE real opjit_imag(opjit_complex_of<real> z)
{
    return z.im;
}

template <typename real>
OPJIT_HOST_DEVICE opjit_complex_of<real> opjit_conj(opjit_complex_of<real> z)
{
    return {z.re, -z.im};
}

template <typename real>
OPJIT_HOST_DEVICE opjit_complex_of<real> operator-(opjit_complex_of<real> z)
{
    return {-z.re, -z.im};
}

template <typename real>
OPJIT_HOST_DEVICE opjit_complex_of<real> operator+(opjit_complex_of<real> a, opjit_complex_of<real> b)
{
    return {a.re + b.re, a.im + b.im};
}

template <typename real>
OPJIT_HOST_DEVICE opjit_complex_of<real> operator-(opjit_complex_of<real> a, opjit_complex_of<real> b)
{
    return {a.re - b.re, a.im - b.im};
}

template <typename real>
OPJIT_HOST_DEVICE opjit_complex_of<real> operator*(opjit_complex_of<real> a, opjit_complex_of<real> b)
{
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}

/* R. L. Smith, Algorithm 116: Complex division, CACM 5 (1962): squares, which overflow first, are not formed. */
template <typename real>
OPJIT_HOST_DEVICE opjit_complex_of<real> operator/(opjit_complex_of<real> a, opjit_complex_of<real> b)
{
    if (b.re == 0 && b.im == 0)
        return {a.re / b.re, a.im / b.re};
    const bool wide = (b.re < 0 ? -b.re : b.re) >= (b.im < 0 ? -b.im : b.im);
    const real ratio = wide ? b.im / b.re : b.re / b.im, size = wide ? b.re + b.im * ratio : b.re * ratio + b.im;
    if (wide)
        return {(a.re + a.im * ratio) / size, (a.im - a.re * ratio) / size};
    return {(a.re * ratio + a.im) / size, (a.im * ratio - a.re) / size};
}

/* An operator with a real number of any type on either side, like in C. */
#define OPJIT_COMPLEX_AND_NUMBER(operator_, before_, after_) \
    template <typename real, typename number> \
    OPJIT_HOST_DEVICE opjit_complex_of<real> operator operator_(opjit_complex_of<real> a, number b) \
    { \
        return before_; \
    } \
    template <typename real, typename number> \
    OPJIT_HOST_DEVICE opjit_complex_of<real> operator operator_(number a, opjit_complex_of<real> b) \
    { \
        return after_; \
    }

OPJIT_COMPLEX_AND_NUMBER(+, OPJIT_COMPLEX(real, a.re + (real)b, a.im), b + a)
OPJIT_COMPLEX_AND_NUMBER(-, OPJIT_COMPLEX(real, a.re - (real)b, a.im), OPJIT_COMPLEX(real, (real)a - b.re, -b.im))
OPJIT_COMPLEX_AND_NUMBER(*, OPJIT_COMPLEX(real, (real)b *a.re, (real)b *a.im), (b * a))
OPJIT_COMPLEX_AND_NUMBER(/, OPJIT_COMPLEX(real, a.re / (real)b, a.im / (real)b), OPJIT_COMPLEX(real, a, 0) / b)

#else

typedef float _Complex opjit_complex64;
typedef double _Complex opjit_complex128;

#define OPJIT_COMPLEX(real_, re_, im_) __builtin_complex((real_)(re_), (real_)(im_))
#define opjit_real(z_) _Generic((z_), opjit_complex64: __builtin_crealf, opjit_complex128: __builtin_creal)(z_)
#define opjit_imag(z_) _Generic((z_), opjit_complex64: __builtin_cimagf, opjit_complex128: __builtin_cimag)(z_)
#define opjit_conj(z_) _Generic((z_), opjit_complex64: __builtin_conjf, opjit_complex128: __builtin_conj)(z_)

#endif

#define OPJIT_CASE_COMPLEX(dtype_, type_, real_, ...) \
    case dtype_: { \
        typedef type_ scalar_t OPJIT_UNUSED; \
        typedef real_ real_t OPJIT_UNUSED; \
        __VA_ARGS__ \
    } break;

#define OPJIT_CASES_COMPLEX(...) \
    OPJIT_CASE_COMPLEX(OPJIT_COMPLEX64, opjit_complex64, float, __VA_ARGS__) \
    OPJIT_CASE_COMPLEX(OPJIT_COMPLEX128, opjit_complex128, double, __VA_ARGS__)

#define OPJIT_DISPATCH_COMPLEX(dtype_, op_, ...) OPJIT_SWITCH(dtype_, op_, OPJIT_CASES_COMPLEX(__VA_ARGS__))

#endif
