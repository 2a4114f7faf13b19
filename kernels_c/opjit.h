/*
 * opjit.h - write a torch operator in plain C.
 *
 * An op is a schema in op.py and one C function. opjit generates the function's prototype from the
 * schema, compiles your file with it, and registers the result with torch:
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
 * You choose the parameters' names. libc's headers are included before your file: pass -D_GNU_SOURCE in extra_cflags.
 *
 * A folder may declare several ops and hold their kernels in one file, named after the folder. The file is compiled once
 * for each op, with OPJIT_OP_<op> defined, so that #ifdef can leave out what the others need.
 *
 * Memory: inputs are borrowed, outputs are handed over, scratch is freed after the call. You never free.
 * Errors: return OPJIT_OK or an error made by OPJIT_CHECK, OPJIT_FAIL, OPJIT_TRY or OPJIT_CUDA_CHECK; it
 * becomes a Python RuntimeError with the op, file, line and text. Never exit, abort, longjmp or throw.
 * A new output is never an input: copy, or declare the input Tensor(a!) and return ().
 * Threads: several threads may call a function at once, without the GIL. Keep no state of your own.
 * Use opjit_parallel_for to run on more threads; the compiler ignores #pragma omp.
 * Debugging: opjit_printf("x[0] = %g\n", x0), of opjit_printf.h, prints where Python's print() would.
 *
 * Contents: 1 dtypes  2 tensors  3 errors  4 memory  5 threads  6 dtype dispatch  7 strided access
 * More:     opjit_elementwise.h (broadcasting, dtype promotion, any strides)  opjit_convert.h (from dtype to dtype)
 *           opjit_half.h (float16, bfloat16)  opjit_cuda.h (.cu files)
 *
 * Valid as C11 and as C++17. Every op's library is linked with the functions declared here, of opjit_runtime.c; its first
 * screen lists the state it keeps.
 */
#ifndef OPJIT_H
#define OPJIT_H

#include <string.h>

#include "opjit_half.h"
#include "opjit_shim.h"

#ifdef __cplusplus
extern "C" {
#endif

#define OPJIT_UNUSED __attribute__((unused))
#define OPJIT_MUST_USE __attribute__((warn_unused_result))

/* Always inlined: the call would cost more than the body. */
#define OPJIT_INLINE OPJIT_UNUSED static inline __attribute__((always_inline))

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
    OPJIT_OTHER_DTYPE, /* float8, quantized and all that torch adds: reject it, or use only its sizes */
    OPJIT_DTYPE_COUNT = OPJIT_OTHER_DTYPE
} opjit_dtype;

/* The name as in Python, without "torch.": "float32". */
const char *opjit_dtype_name(opjit_dtype dtype);

/* Bytes of one element; 0 for OPJIT_OTHER_DTYPE. */
size_t opjit_dtype_size(opjit_dtype dtype);

OPJIT_HOST_DEVICE bool opjit_is_floating(opjit_dtype dtype)
{
    return dtype >= OPJIT_FLOAT16 && dtype <= OPJIT_FLOAT64;
}

/* Integers and bool. */
OPJIT_HOST_DEVICE bool opjit_is_integral(opjit_dtype dtype)
{
    return dtype <= OPJIT_UINT64;
}

/* ---------------------------------------------------------------------------------------------- */
/* 2. Tensors                                                                                     */

#define OPJIT_MAX_DIM 64 /* torch's own limit */

/* A view of a torch tensor, valid during the call. */
typedef struct opjit_tensor {
    void *data;             /* first element; may be NULL when numel is 0 */
    int64_t numel;          /* number of elements */
    int64_t dim;            /* number of dimensions, 0 for a scalar */
    const int64_t *sizes;   /* dim entries */
    const int64_t *strides; /* dim entries, in elements */
    opjit_dtype dtype;
    int32_t device_type;     /* as torch numbers them */
    int32_t device_index;    /* -1 for the CPU */
    bool contiguous;         /* in row-major order without gaps */
    torch_tensor handle;     /* torch's tensor; NULL for an output that does not exist yet */
    struct opjit_call *call; /* for the glue */
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

/* NULL is success. An error owns its text, so it may cross threads; the glue frees it. */
typedef struct opjit_error *opjit_status;

#define OPJIT_OK ((opjit_status)0)

__attribute__((format(printf, 3, 4), returns_nonnull, cold)) opjit_status opjit_error_new(const char *file, int line,
                                                                                          const char *format, ...);

/* Return an error from the current function: OPJIT_FAIL("x is %s", why). */
#define OPJIT_FAIL(...) return opjit_error_new(__FILE__, __LINE__, __VA_ARGS__)

/* The same unless the condition holds: OPJIT_CHECK(a > 0, "a must be positive, not %f", a). */
#define OPJIT_CHECK(condition, ...) \
    do { \
        if (!(condition)) \
            OPJIT_FAIL(__VA_ARGS__); \
    } while (0)

/* Return the error, if any, of a call that returns opjit_status. */
#define OPJIT_TRY(call_) \
    do { \
        opjit_status opjit_try_ = (call_); \
        if (opjit_try_ != OPJIT_OK) \
            return opjit_try_; \
    } while (0)

/* The same for a call of torch's C interface (opjit_shim.h). */
#define OPJIT_TORCH(call_) \
    do { \
        if ((call_) != 0) \
            return opjit_torch_error(__FILE__, __LINE__, #call_); \
    } while (0)

/* The text is torch's own from 2.13 on; earlier versions print it to stderr. */
__attribute__((returns_nonnull, cold)) opjit_status opjit_torch_error(const char *file, int line, const char *what);

/* ---------------------------------------------------------------------------------------------- */
/* 4. Memory                                                                                      */

/*
 * Create an output with uninitialised elements on the device of `like` (any tensor argument). `strides` counts elements;
 * NULL means contiguous. Create each output once: a second call is an error.
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
 * An output with the sizes of `like` and the strides of torch.empty_like: those of `like` if it is dense, else dense with
 * the dimensions in the memory order of `like` (infer_dense_strides in ATen/ExpandUtils.cpp).
 */
OPJIT_MUST_USE opjit_status opjit_empty_like(opjit_tensor *out, const opjit_tensor *like, opjit_dtype dtype);

/*
 * Uninitialised memory on the device of `like`, at least 16-byte aligned, freed when the call ends. On CUDA it is freed in
 * stream order, so launched kernels may still use it. A pointer to 0 bytes must not be read.
 */
OPJIT_MUST_USE opjit_status opjit_scratch(void **memory, int64_t bytes, const opjit_tensor *like);

/* ---------------------------------------------------------------------------------------------- */
/* 5. Threads                                                                                     */

typedef opjit_status opjit_range_body(int64_t begin, int64_t end, void *context);

/*
 * Split the range into parts and call body(begin, end, context) for each on torch's thread pool. A range of at most `grain`,
 * or one inside another parallel region, runs in the caller's thread. The body runs in other threads: share data through
 * context, do not allocate, return errors as usual. The first error is returned.
 */
OPJIT_MUST_USE opjit_status opjit_parallel_for(int64_t begin, int64_t end, int64_t grain, opjit_range_body *body,
                                               void *context);

/* ---------------------------------------------------------------------------------------------- */
/* 6. Dtype dispatch                                                                              */

/*
 * C has no templates: the block is compiled for each dtype, with `scalar_t` as its C type.
 *
 *     OPJIT_DISPATCH_FLOATING(x->dtype, "scale", {
 *         const scalar_t *from = (const scalar_t *)x->data;
 *         ...
 *     });
 *
 * Any other dtype returns an error that names the op and the dtype. C has no arithmetic for float16 and bfloat16
 * (opjit_half.h); give them a case of their own: OPJIT_CASE(OPJIT_FLOAT16, opjit_half, {...}).
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

/* The offset from data, in elements, of element `index`, counted in row-major order. */
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
 * The elements of `t` in memory order, in as few dimensions as possible: drops dimensions of size 1, sorts the others by
 * stride and merges neighbours where one continues the other. For work that may take elements in any order, such as a sum:
 * a transposed or permuted tensor becomes one contiguous dimension. An empty tensor gives one dimension of size 0, a scalar
 * one of size 1.
 */
opjit_layout opjit_coalesce(const opjit_tensor *t);

#ifdef __cplusplus
}
#endif

#endif
