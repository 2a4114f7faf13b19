/*
 * opjit.h - write a torch operator in plain C.
 *
 * An op is a schema in op.py and one C function. opjit generates the function's prototype from the
 * schema, compiles your file behind it, and registers the result with torch:
 *
 *     schema     scale(Tensor x, float a) -> Tensor
 *
 *     scale.c    #include "opjit.h"
 *
 *                opjit_status scale_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
 *                {
 *                    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32, "scale takes float32, not %s", opjit_dtype_name(x->dtype));
 *                    OPJIT_CHECK(x->contiguous, "scale takes a contiguous tensor; call .contiguous() on it");
 *                    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
 *                    const float *from = x->data;
 *                    float *to = out->data;
 *                    for (int64_t i = 0; i < x->numel; i++)
 *                        to[i] = (float)a * from[i];
 *                    return OPJIT_OK;
 *                }
 *
 * The function is named <op>_<backend>; scale_cuda in scale.cu takes a cudaStream_t as its last argument
 * (see opjit_cuda.h). Arguments come in the schema's order, then one pointer for each result:
 *
 *     in the schema                      in C
 *     Tensor, Tensor?                    const opjit_tensor *               NULL for None
 *     Tensor(a!), Tensor(a!)?            opjit_tensor *                     NULL for None
 *     int, SymInt  float  bool           int64_t  double  bool
 *     str  ScalarType                    const char *  opjit_dtype
 *     int? float? bool? ScalarType?      pointer to const                   NULL for None (str?: NULL too)
 *     int[] float[] bool[] Tensor[]      const opjit_ints *, opjit_floats *, opjit_bools *, opjit_tensors *
 *     -> Tensor  int  float  bool        opjit_tensor *  int64_t *  double *  bool *
 *
 * The parameters' names are yours. Headers of libc are read before your file: -D_GNU_SOURCE goes into extra_cflags.
 *
 * A folder may declare several ops and hold their kernels in one file, named after the folder. It is compiled for each
 * of them, with OPJIT_OP_<op> defined: what the others need can be left out.
 *
 * Memory: inputs are borrowed, outputs are handed over, scratch is freed after the call. You never free.
 * Errors: return OPJIT_OK or an error made by OPJIT_CHECK, OPJIT_FAIL, OPJIT_TRY or OPJIT_CUDA_CHECK; it
 * becomes a Python RuntimeError with the op, file, line and text. Never exit, abort, longjmp or throw.
 * A new output is never an input: copy, or declare the input Tensor(a!) and return ().
 * Threads: a function may be called from several threads at once, without the GIL. Keep no state of your own.
 * For more threads there is opjit_parallel_for; the compiler passes over #pragma omp.
 * Debugging: opjit_printf("x[0] = %g\n", x0), of opjit_printf.h, shows its text where Python's print() would.
 *
 * Contents: 1 dtypes  2 tensors  3 errors  4 memory  5 threads  6 dtype dispatch  7 strided access
 *           8 half precision. For ops that work element by element there is more in opjit_elementwise.h.
 *
 * Valid as C11 and as C++17. The functions declared here are in opjit_runtime.c, which is compiled into every op's
 * library; its first screen says what little state there is.
 */
#ifndef OPJIT_H
#define OPJIT_H

#include <string.h>

#include "opjit_shim.h"

#ifdef __cplusplus
extern "C" {
#endif

#define OPJIT_UNUSED __attribute__((unused))
#define OPJIT_MUST_USE __attribute__((warn_unused_result))

/* A call would cost more than what these functions do, at run time and, without optimisation, to compile. */
#define OPJIT_INLINE OPJIT_UNUSED static inline __attribute__((always_inline))

/* Small functions that a CUDA kernel may call too. */
#ifdef __CUDACC__
#define OPJIT_HOST_DEVICE OPJIT_INLINE __host__ __device__
#else
#define OPJIT_HOST_DEVICE OPJIT_INLINE
#endif

/* ---------------------------------------------------------------------------------------------- */
/* 1. Dtypes                                                                                      */

typedef enum opjit_dtype {
    OPJIT_BOOL,
    OPJIT_UINT8,
    OPJIT_INT8,
    OPJIT_INT16,
    OPJIT_INT32,
    OPJIT_INT64,
    OPJIT_UINT16,
    OPJIT_UINT32,
    OPJIT_UINT64,
    OPJIT_FLOAT16,
    OPJIT_BFLOAT16,
    OPJIT_FLOAT32,
    OPJIT_FLOAT64,
    OPJIT_COMPLEX64,
    OPJIT_COMPLEX128,
    OPJIT_OTHER_DTYPE, /* float8, quantized and whatever torch adds: refuse it, or look at nothing but its sizes */
    OPJIT_DTYPE_COUNT = OPJIT_OTHER_DTYPE
} opjit_dtype;

/* The name as in Python, without "torch.": "float32". */
const char *opjit_dtype_name(opjit_dtype dtype);

/* Bytes of one element; 0 for OPJIT_OTHER_DTYPE. */
size_t opjit_dtype_size(opjit_dtype dtype);

OPJIT_INLINE bool opjit_is_floating(opjit_dtype dtype)
{
    return dtype >= OPJIT_FLOAT16 && dtype <= OPJIT_FLOAT64;
}

/* Integers and bool. */
OPJIT_INLINE bool opjit_is_integral(opjit_dtype dtype)
{
    return dtype <= OPJIT_UINT64;
}

/* ---------------------------------------------------------------------------------------------- */
/* 2. Tensors                                                                                     */

#define OPJIT_MAX_DIM 64 /* torch's own limit */

/* A view of a torch tensor, valid for the length of the call. */
typedef struct opjit_tensor {
    void *data;              /* first element; may be NULL when numel is 0 */
    int64_t numel;           /* number of elements */
    int64_t dim;             /* number of dimensions, 0 for a scalar */
    const int64_t *sizes;    /* dim entries */
    const int64_t *strides;  /* dim entries, in elements */
    opjit_dtype dtype;
    int32_t device_type;     /* torch's number */
    int32_t device_index;    /* -1 for the CPU */
    bool contiguous;         /* in row-major order without gaps */
    torch_tensor handle;     /* torch's tensor; NULL for an output that was not made yet */
    struct opjit_call *call; /* the glue's own */
} opjit_tensor;

typedef struct opjit_ints {
    const int64_t *data;
    int64_t len;
} opjit_ints;

typedef struct opjit_floats {
    const double *data;
    int64_t len;
} opjit_floats;

typedef struct opjit_bools {
    const bool *data;
    int64_t len;
} opjit_bools;

typedef struct opjit_tensors {
    const opjit_tensor *data;
    int64_t len;
} opjit_tensors;

/* ---------------------------------------------------------------------------------------------- */
/* 3. Errors                                                                                      */

/* NULL is success. An error carries its own text, so it can travel between threads; the glue frees it. */
typedef struct opjit_error *opjit_status;

#define OPJIT_OK ((opjit_status)0)

__attribute__((format(printf, 3, 4), returns_nonnull, cold)) opjit_status opjit_error_new(const char *file, int line,
                                                                                         const char *format, ...);

/* Return an error from the function at hand: OPJIT_FAIL("x is %s", why). */
#define OPJIT_FAIL(...) return opjit_error_new(__FILE__, __LINE__, __VA_ARGS__)

/* ... unless the condition holds: OPJIT_CHECK(a > 0, "a must be positive, not %f", a). */
#define OPJIT_CHECK(condition, ...) \
    do { \
        if (__builtin_expect(!(condition), 0)) \
            OPJIT_FAIL(__VA_ARGS__); \
    } while (0)

/* Pass on the error of a function that returns opjit_status. */
#define OPJIT_TRY(call_) \
    do { \
        opjit_status opjit_try_ = (call_); \
        if (__builtin_expect(opjit_try_ != OPJIT_OK, 0)) \
            return opjit_try_; \
    } while (0)

/* Pass on the error of a function of torch's C interface (opjit_shim.h). */
#define OPJIT_TORCH(call_) \
    do { \
        if (__builtin_expect((call_) != 0, 0)) \
            return opjit_torch_error(__FILE__, __LINE__, #call_); \
    } while (0)

/* torch keeps the text of its errors from 2.13 on; before, it prints them to stderr. */
__attribute__((returns_nonnull, cold)) opjit_status opjit_torch_error(const char *file, int line, const char *what);

/* ---------------------------------------------------------------------------------------------- */
/* 4. Memory                                                                                      */

/*
 * Make an output with uninitialised elements, on the device of `like` (any tensor argument), with the given
 * strides in elements; strides NULL means contiguous. Calling it twice for one output is an error.
 */
OPJIT_MUST_USE opjit_status opjit_empty_strided(opjit_tensor *out, int64_t dim, const int64_t *sizes,
                                                const int64_t *strides, opjit_dtype dtype, const opjit_tensor *like);

/* A contiguous output: opjit_empty(out, 2, (int64_t[]){n, m}, x->dtype, x). */
OPJIT_MUST_USE OPJIT_INLINE opjit_status opjit_empty(opjit_tensor *out, int64_t dim, const int64_t *sizes,
                                                     opjit_dtype dtype, const opjit_tensor *like)
{
    return opjit_empty_strided(out, dim, sizes, NULL, dtype, like);
}

/*
 * An output of the sizes of `like` and the strides that torch.empty_like would give it: those of `like` where it is
 * dense, else dense with the dimensions in the memory order of `like` (infer_dense_strides in ATen/ExpandUtils.cpp).
 */
OPJIT_MUST_USE opjit_status opjit_empty_like(opjit_tensor *out, const opjit_tensor *like, opjit_dtype dtype);

/*
 * Uninitialised memory on the device of `like`, at least 16-byte aligned, freed when the call ends (on CUDA in
 * stream order, so a kernel that was launched may still use it). 0 bytes give a pointer that must not be read.
 */
OPJIT_MUST_USE opjit_status opjit_scratch(void **memory, int64_t bytes, const opjit_tensor *like);

/* ---------------------------------------------------------------------------------------------- */
/* 5. Threads                                                                                     */

typedef opjit_status opjit_range_body(int64_t begin, int64_t end, void *context);

/*
 * Call body(begin, end, context) on parts of the range that cover it, on torch's thread pool: in the caller's
 * thread when the range is not longer than `grain` or when already inside a parallel region. The body runs in
 * other threads: share through context, allocate nothing, return an error as anywhere. The first error is returned.
 */
OPJIT_MUST_USE opjit_status opjit_parallel_for(int64_t begin, int64_t end, int64_t grain, opjit_range_body *body,
                                               void *context);

/* ---------------------------------------------------------------------------------------------- */
/* 6. Dtype dispatch                                                                              */

/*
 * C has no templates: the block is compiled once for each dtype, with `scalar_t` as its C type.
 *
 *     OPJIT_DISPATCH_FLOATING(x->dtype, "scale", {
 *         const scalar_t *from = (const scalar_t *)x->data;
 *         ...
 *     });
 *
 * A dtype outside the set returns an error that names the op and the dtype. float16 and bfloat16 are storage
 * types without arithmetic (section 8); give them a case of their own: OPJIT_CASE(OPJIT_FLOAT16, opjit_half, {...}).
 */
#define OPJIT_CASE(dtype_, type_, ...) \
    case dtype_: { \
        typedef type_ scalar_t; \
        __VA_ARGS__ \
    } break;

#define OPJIT_CASES_FLOATING(...) \
    OPJIT_CASE(OPJIT_FLOAT32, float, __VA_ARGS__) \
    OPJIT_CASE(OPJIT_FLOAT64, double, __VA_ARGS__)

#define OPJIT_CASES_INTEGRAL(...) \
    OPJIT_CASE(OPJIT_UINT8, uint8_t, __VA_ARGS__) \
    OPJIT_CASE(OPJIT_INT8, int8_t, __VA_ARGS__) \
    OPJIT_CASE(OPJIT_INT16, int16_t, __VA_ARGS__) \
    OPJIT_CASE(OPJIT_INT32, int32_t, __VA_ARGS__) \
    OPJIT_CASE(OPJIT_INT64, int64_t, __VA_ARGS__) \
    OPJIT_CASE(OPJIT_UINT16, uint16_t, __VA_ARGS__) \
    OPJIT_CASE(OPJIT_UINT32, uint32_t, __VA_ARGS__) \
    OPJIT_CASE(OPJIT_UINT64, uint64_t, __VA_ARGS__)

#define OPJIT_SWITCH(dtype_, op_, cases_) \
    switch (dtype_) { \
        cases_ \
    default: OPJIT_FAIL("%s does not take %s", op_, opjit_dtype_name(dtype_)); \
    }

#define OPJIT_DISPATCH_FLOATING(dtype_, op_, ...) OPJIT_SWITCH(dtype_, op_, OPJIT_CASES_FLOATING(__VA_ARGS__))
#define OPJIT_DISPATCH_INTEGRAL(dtype_, op_, ...) OPJIT_SWITCH(dtype_, op_, OPJIT_CASES_INTEGRAL(__VA_ARGS__))
#define OPJIT_DISPATCH_REAL(dtype_, op_, ...) \
    OPJIT_SWITCH(dtype_, op_, OPJIT_CASES_INTEGRAL(__VA_ARGS__) OPJIT_CASES_FLOATING(__VA_ARGS__))

/* ---------------------------------------------------------------------------------------------- */
/* 7. Strided access                                                                              */

/* Where element `index`, counted in row-major order, lies: its offset from data, in elements. */
OPJIT_HOST_DEVICE int64_t opjit_offset(const opjit_tensor *t, int64_t index)
{
    int64_t offset = 0;
    if (t->contiguous)
        return index;
    for (int64_t d = t->dim - 1; d >= 0; d--) {
        offset += index % t->sizes[d] * t->strides[d];
        index /= t->sizes[d];
    }
    return offset;
}

/* A shape without a tensor: `dim` sizes and strides, outermost first. */
typedef struct opjit_layout {
    int64_t dim;
    int64_t sizes[OPJIT_MAX_DIM];
    int64_t strides[OPJIT_MAX_DIM];
} opjit_layout;

/*
 * The elements of `t` in the order that reads memory best, in as few dimensions as possible: dimensions of size
 * 1 dropped, the others sorted by stride, neighbours merged where one continues the other. For work that does
 * not care about the order, such as a sum: a transposed or permuted tensor becomes one contiguous dimension.
 * An empty tensor gives one dimension of size 0, a scalar one of size 1.
 */
opjit_layout opjit_coalesce(const opjit_tensor *t);

/* ---------------------------------------------------------------------------------------------- */
/* 8. Half precision                                                                              */

/* Storage of float16 and bfloat16; compute in float. Conversions round to nearest even and keep NaN. */
typedef struct opjit_half {
    uint16_t bits;
} opjit_half;

typedef struct opjit_bfloat16 {
    uint16_t bits;
} opjit_bfloat16;

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
        result.bits = 0x7fc0;
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
#else
    uint32_t sign = (uint32_t)(value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
    uint32_t bits;
    if (rest >= 0x7c00u)
        bits = sign | 0x7f800000u | (rest & 0x3ffu) << 13; /* infinity, NaN */
    else if (rest >= 0x400u)
        bits = sign | ((rest << 13) + 0x38000000u); /* normal: the exponent's bias grows by 112 */
    else /* subnormal: rest times 2^-24, exactly */
        bits = sign | opjit_bits_of_float((float)rest * 5.9604644775390625e-8f);
    return opjit_float_of_bits(bits);
#endif
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
    result.bits = (uint16_t)((opjit_words_)__builtin_ia32_vcvtps2ph(number, 0))[0]; /* to nearest, ties to even */
#else
    uint32_t bits = opjit_bits_of_float(value), rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u)
        rest = 0x7e00u;
    else if (rest >= 0x477ff000u) /* 65520 and more round to infinity */
        rest = 0x7c00u;
    else if (rest >= 0x38800000u) /* normal */
        rest = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
    else /* subnormal: adding 0.5 puts the wanted bits last, rounded */
        rest = opjit_bits_of_float(opjit_float_of_bits(rest) + 0.5f) - 0x3f000000u;
    result.bits = (uint16_t)((bits >> 16 & 0x8000u) | rest);
#endif
    return result;
}

#ifdef __cplusplus
}
#endif

#endif
