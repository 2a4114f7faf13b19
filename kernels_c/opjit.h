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
 * The function is named <op>_<backend>. scale_cuda in scale.cu has a cudaStream_t as its last argument (see
 * opjit_cuda.h). The arguments are in the order of the schema, followed by one pointer for each result:
 *
 *     in the schema                      in C
 *     Tensor, Tensor?                    const opjit_tensor *               NULL for None
 *     Tensor(a!), Tensor(a!)?            opjit_tensor *                     NULL for None
 *     int, SymInt  float  bool           int64_t  double  bool
 *     str  ScalarType                    const char *  opjit_dtype
 *     Generator?                         const uint64_t *                   a seed for this call; see opjit_random.h
 *     int? float? bool? ScalarType?      pointer to const                   NULL for None (also str?)
 *     int[] float[] bool[] Tensor[]      const opjit_ints *, opjit_floats *, opjit_bools *, opjit_tensors *
 *     -> Tensor  int  float  bool        opjit_tensor *  int64_t *  double *  bool *
 *     -> Tensor?                         opjit_tensor *                     None if you don't make it
 *     -> Tensor[]                        opjit_outputs *                    after opjit_make_outputs
 *
 * You choose the names of the parameters. libc's headers are included before your file, so if you need _GNU_SOURCE,
 * pass -D_GNU_SOURCE in extra_cflags.
 *
 * A directory can declare several ops, with all kernels in one file that has the name of the directory. The file is
 * compiled once for each op, with OPJIT_OP_<op> defined, so that #ifdef can leave out the code of the other ops.
 *
 * Memory: a kernel borrows its inputs and hands its outputs to torch. Scratch memory is freed after the call. Never
 * free memory yourself.
 * Errors: return OPJIT_OK, or an error from OPJIT_CHECK, OPJIT_FAIL, OPJIT_TRY or OPJIT_CUDA_CHECK. It becomes a Python
 * RuntimeError with the op, text, file and line. Never exit, abort, longjmp or throw.
 * Outputs: a new output must not be an input. Copy the input, or declare it as Tensor(a!). If the schema returns an
 * argument, for example add_(Tensor(a!) x) -> Tensor(a!), the result doesn't have a separate pointer, so write to x.
 * Threads: several threads may call a function at the same time, without the GIL, so don't keep state between calls.
 * To run on more threads, use opjit_parallel_for. The compiler ignores #pragma omp.
 * Debugging: opjit_printf("x[0] = %g\n", x0), from opjit_printf.h, prints to the same output as Python's print().
 *
 * Contents: 1 dtypes  2 tensors  3 errors  4 memory  5 threads  6 dtype dispatch  7 strided access
 * More:     opjit_elementwise.h (broadcasting, dtype promotion, any strides)  opjit_convert.h (from dtype to dtype)
 *           opjit_half.h (float16, bfloat16)  opjit_cuda.h (.cu files)  opjit_caffe.h (Caffe's CUDA macros)
 *           opjit_random.h (Philox)  opjit_reduce.h (warps and blocks)  opjit_pack.h (16 bytes)
 *           opjit_complex.h (complex numbers)  opjit_peers.h (kernels across GPUs)
 *
 * This header is valid C11 and C++17. Every op is linked with opjit_runtime.c, which defines these functions and lists
 * its state on its first screen, and with opjit_elementwise.c.
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
    OPJIT_FLOAT8_E4M3FN, /* float8: opjit_is_float8() */
    OPJIT_FLOAT8_E5M2,
    OPJIT_FLOAT16,
    OPJIT_BFLOAT16,
    OPJIT_FLOAT32,
    OPJIT_FLOAT64,
    OPJIT_COMPLEX64,
    OPJIT_COMPLEX128,
    OPJIT_OTHER_DTYPE, /* quantized, other kinds of float8 and future dtypes: reject it, or use only its sizes */
    OPJIT_DTYPE_COUNT = OPJIT_OTHER_DTYPE
} opjit_dtype;

/* The name as in Python, without "torch.": "float32". */
const char *opjit_dtype_name(opjit_dtype dtype);

/* Bytes of one element; 0 for OPJIT_OTHER_DTYPE. */
size_t opjit_dtype_size(opjit_dtype dtype);

/* float16, bfloat16, float32, float64. */
OPJIT_HOST_DEVICE bool opjit_is_floating(opjit_dtype dtype)
{
    return dtype >= OPJIT_FLOAT16 && dtype <= OPJIT_FLOAT64;
}

OPJIT_HOST_DEVICE bool opjit_is_float8(opjit_dtype dtype)
{
    return dtype == OPJIT_FLOAT8_E4M3FN || dtype == OPJIT_FLOAT8_E5M2;
}

/* Integers and bool. */
OPJIT_HOST_DEVICE bool opjit_is_integral(opjit_dtype dtype)
{
    return dtype <= OPJIT_UINT64;
}

/* ---------------------------------------------------------------------------------------------- */
/* 2. Tensors                                                                                     */

#define OPJIT_MAX_DIM 64 /* the limit of torch */

/* A view of a torch tensor, valid during the call. */
typedef struct opjit_tensor {
    void *data;             /* first element; may be NULL when numel is 0 */
    int64_t numel;          /* number of elements */
    int64_t dim;            /* number of dimensions, 0 for a scalar */
    const int64_t *sizes;   /* dim entries */
    const int64_t *strides; /* dim entries, in elements */
    opjit_dtype dtype;
    int32_t device_type;     /* torch's number */
    int32_t device_index;    /* -1 for the CPU */
    bool contiguous;         /* in row-major order without gaps */
    torch_tensor handle;     /* torch's tensor; NULL for an output that does not exist yet */
    struct opjit_call *call; /* for the generated wrapper */
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

/* A list that an op returns. */
typedef struct opjit_outputs {
    opjit_tensor *data;
    int64_t len;
    struct opjit_call *call; /* for the generated wrapper */
} opjit_outputs;

/* ---------------------------------------------------------------------------------------------- */
/* 3. Errors                                                                                      */

/* NULL is success. An error owns its text, so it may cross threads. The generated wrapper frees it. */
typedef struct opjit_error *opjit_status;

#define OPJIT_OK ((opjit_status)0)

__attribute__((format(printf, 3, 4), returns_nonnull, cold)) opjit_status opjit_error_new(const char *file, int line,
                                                                                          const char *format, ...);

/* Attach the caller's file and line to an error without them. */
__attribute__((returns_nonnull, cold)) opjit_status opjit_error_at(opjit_status error, const char *file, int line);

/* Source location of an error. It is empty in opjit's files. */
#ifndef OPJIT_PLACE
#define OPJIT_PLACE __FILE__, __LINE__
#endif

/* Return an error from the current function: OPJIT_FAIL("x is %s", why). */
#define OPJIT_FAIL(...) return opjit_error_new(OPJIT_PLACE, __VA_ARGS__)

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
            return opjit_error_at(opjit_try_, OPJIT_PLACE); \
    } while (0)

/* The same for a call of torch's C interface (opjit_shim.h). */
#define OPJIT_TORCH(call_) \
    do { \
        if ((call_) != 0) \
            return opjit_torch_error(OPJIT_PLACE, #call_); \
    } while (0)

/* From torch 2.13 on, the text comes from torch. Earlier versions print it to stderr. */
__attribute__((returns_nonnull, cold)) opjit_status opjit_torch_error(const char *file, int line, const char *what);

/* ---------------------------------------------------------------------------------------------- */
/* 4. Memory                                                                                      */

/*
 * Create an output with uninitialized elements on the device of `like` (any tensor argument). `strides` counts
 * elements, and NULL means contiguous. Create each output once, because a second call is an error.
 */
OPJIT_MUST_USE opjit_status opjit_empty_strided(opjit_tensor *out, int64_t dim, const int64_t *sizes,
                                                const int64_t *strides, opjit_dtype dtype, const opjit_tensor *like);

/* A contiguous output: opjit_empty(out, OPJIT_SIZES(n, m), x->dtype, x) or opjit_empty(out, x->dim, x->sizes, ...). */
OPJIT_MUST_USE OPJIT_INLINE opjit_status opjit_empty(opjit_tensor *out, int64_t dim, const int64_t *sizes,
                                                     opjit_dtype dtype, const opjit_tensor *like)
{
    return opjit_empty_strided(out, dim, sizes, NULL, dtype, like);
}

/*
 * Give a list of outputs its length, once. Then make each item:
 *
 *     OPJIT_TRY(opjit_make_outputs(parts, n));
 *     for (int64_t i = 0; i < n; i++)
 *         OPJIT_TRY(opjit_empty_like(&parts->data[i], x, x->dtype));
 */
OPJIT_MUST_USE opjit_status opjit_make_outputs(opjit_outputs *list, int64_t len);

/*
 * An output with the sizes of `like` and the strides of torch.empty_like. If `like` is dense, the strides are the same.
 * Otherwise they are dense, in the memory order of `like` (infer_dense_strides in ATen/ExpandUtils.cpp).
 */
OPJIT_MUST_USE opjit_status opjit_empty_like(opjit_tensor *out, const opjit_tensor *like, opjit_dtype dtype);

/*
 * Uninitialized memory on the device of `like`, at least 16-byte aligned, freed when the call ends. On CUDA it is freed
 * in stream order, so launched kernels may still use it. A pointer to 0 bytes must not be read.
 */
OPJIT_MUST_USE opjit_status opjit_scratch(void **memory, int64_t bytes, const opjit_tensor *like);

/* The same for `count` elements of a pointer's type: float *sums; OPJIT_SCRATCH(sums, n, x); */
#define OPJIT_SCRATCH(pointer_, count_, like_) \
    do { \
        void *opjit_memory_; \
        OPJIT_TRY(opjit_scratch(&opjit_memory_, (int64_t)(count_) * (int64_t)sizeof *(pointer_), (like_))); \
        (pointer_) = (__typeof__(pointer_))opjit_memory_; \
    } while (0)

/*
 * `x` itself if it is contiguous, otherwise a contiguous copy that lives until the call ends, in stream order on CUDA.
 * Only read from it, because if `x` is contiguous, a write would change `x`.
 *
 *     opjit_tensor copy;
 *     OPJIT_TRY(opjit_contiguous(&copy, x));
 */
OPJIT_MUST_USE opjit_status opjit_contiguous(opjit_tensor *copy, const opjit_tensor *x);

/* ---------------------------------------------------------------------------------------------- */
/* 5. Threads                                                                                     */

typedef opjit_status opjit_range_body(int64_t begin, int64_t end, void *context);

/*
 * Split the range into parts and call body(begin, end, context) for each part on torch's thread pool. A range of at
 * most `grain`, or inside another parallel region, runs in the caller's thread. Because the body runs in other threads,
 * share data through `context`, don't allocate, and return errors as usual. The first error is returned.
 */
OPJIT_MUST_USE opjit_status opjit_parallel_for(int64_t begin, int64_t end, int64_t grain, opjit_range_body *body,
                                               void *context);

/*
 * Return whether Ctrl-C (SIGINT) arrived during this call. `x` is any tensor argument. Use it in loops that last
 * seconds, in any thread, including the threads of opjit_parallel_for. Each check costs a system call, so call it about
 * once per millisecond. The first check in a process installs a signal handler that forwards to Python's. Earlier
 * interrupts are missed. Make the outputs first, leave the loop, and return OPJIT_OK: the main thread raises
 * KeyboardInterrupt before it sees them. In other threads, and if Python's handler raises nothing, the op raises a
 * RuntimeError.
 *
 *     for (int64_t step = 0; step < steps && !opjit_interrupted(x); step++)
 *         relax(out, x);
 */
bool opjit_interrupted(const opjit_tensor *x);

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
 * For any other dtype, the macro returns an error that names the op and the dtype. C lacks arithmetic for float8,
 * float16 and bfloat16. With OPJIT_DISPATCH_FLOAT8 and OPJIT_DISPATCH_ALL_FLOATING, compute in `opmath_t`, which is
 * double for float64 and float for the other dtypes:
 *
 *     OPJIT_DISPATCH_ALL_FLOATING(x->dtype, "scale", {
 *         const scalar_t *from = (const scalar_t *)x->data;
 *         scalar_t *to = (scalar_t *)out->data;
 *         OPJIT_FOR_EACH(i, at, x)
 *             opjit_store(to + i, (opmath_t)a * opjit_load(from + at));
 *     });
 */
#define OPJIT_CASE(dtype_, type_, ...) OPJIT_CASE_OPMATH(dtype_, type_, type_, __VA_ARGS__)

#define OPJIT_CASE_OPMATH(dtype_, type_, opmath_, ...) \
    case dtype_: { \
        typedef type_ scalar_t OPJIT_UNUSED; \
        typedef opmath_ opmath_t OPJIT_UNUSED; \
        __VA_ARGS__ \
    } break;

#define OPJIT_CASES_FLOATING(...) \
    OPJIT_CASE(OPJIT_FLOAT32, float, __VA_ARGS__) \
    OPJIT_CASE(OPJIT_FLOAT64, double, __VA_ARGS__)

#define OPJIT_CASES_HALF(...) \
    OPJIT_CASE_OPMATH(OPJIT_FLOAT16, opjit_half, float, __VA_ARGS__) \
    OPJIT_CASE_OPMATH(OPJIT_BFLOAT16, opjit_bfloat16, float, __VA_ARGS__)

#define OPJIT_CASES_FLOAT8(...) \
    OPJIT_CASE_OPMATH(OPJIT_FLOAT8_E4M3FN, opjit_float8_e4m3fn, float, __VA_ARGS__) \
    OPJIT_CASE_OPMATH(OPJIT_FLOAT8_E5M2, opjit_float8_e5m2, float, __VA_ARGS__)

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
#define OPJIT_DISPATCH_ALL_FLOATING(dtype_, op_, ...) \
    OPJIT_SWITCH(dtype_, op_, OPJIT_CASES_HALF(__VA_ARGS__) OPJIT_CASES_FLOATING(__VA_ARGS__))
#define OPJIT_DISPATCH_FLOAT8(dtype_, op_, ...) OPJIT_SWITCH(dtype_, op_, OPJIT_CASES_FLOAT8(__VA_ARGS__))
#define OPJIT_DISPATCH_INTEGRAL(dtype_, op_, ...) OPJIT_SWITCH(dtype_, op_, OPJIT_CASES_INTEGRAL(__VA_ARGS__))
#define OPJIT_DISPATCH_REAL(dtype_, op_, ...) \
    OPJIT_SWITCH(dtype_, op_, OPJIT_CASES_INTEGRAL(__VA_ARGS__) OPJIT_CASES_FLOATING(__VA_ARGS__))

/* ---------------------------------------------------------------------------------------------- */
/* 7. Strided access                                                                              */

/*
 * Visit every element in row-major order. i counts the elements from 0, and element i of x is data[at], for any
 * strides.
 *
 *     OPJIT_FOR_EACH(i, at, x)
 *         to[i] = 2 * from[at];
 *
 * OPJIT_FOR_EACH2 visits two tensors of the same sizes. OPJIT_FOR_RANGE visits the elements from `begin` to `end`, for
 * example in an opjit_range_body. Each is a plain loop over strides inside another loop, and as fast as nested loops by
 * hand. The compiler vectorizes it if the elements are adjacent. `break` leaves only the inner loop. To access the
 * neighbors of an element, use the strides: from[i * x->strides[0] + j * x->strides[1]].
 */
#define OPJIT_FOR_EACH(i_, at_, x_) OPJIT_FOR_RANGE(i_, 0, (x_)->numel, at_, x_)

#define OPJIT_FOR_RANGE(i_, begin_, end_, at_, x_) \
    OPJIT_FOR_ROWS((x_), NULL, 1, begin_, end_) \
    for (int64_t i_ = opjit_w.i, at_ = opjit_w.at[0], opjit_step = opjit_w.steps[0], opjit_end = opjit_w.row_end; \
         i_ < opjit_end; i_++, at_ += opjit_step)

#define OPJIT_FOR_EACH2(i_, at_x_, x_, at_y_, y_) \
    OPJIT_FOR_ROWS((x_), (y_), 2, 0, (x_)->numel) \
    for (int64_t i_ = opjit_w.i, at_x_ = opjit_w.at[0], at_y_ = opjit_w.at[1], opjit_step = opjit_w.steps[0], \
                 opjit_step2 = opjit_w.steps[1], opjit_end = opjit_w.row_end; \
         i_ < opjit_end; i_++, at_x_ += opjit_step, at_y_ += opjit_step2)

#define OPJIT_FOR_ROWS(x_, y_, operands_, begin_, end_) \
    for (opjit_elements opjit_e = opjit_in_order(x_, y_); opjit_e.dim > 0; opjit_e.dim = 0) \
        for (opjit_walk opjit_w = opjit_walk_of(&opjit_e, begin_, end_); opjit_w.i < opjit_w.end; \
             opjit_next_row(&opjit_w, &opjit_e, operands_))

/* Return whether both tensors have the same sizes. */
bool opjit_same_sizes(const opjit_tensor *x, const opjit_tensor *y);

#define OPJIT_MAX_OPERANDS 4

/* Tensors that are visited together. Dimensions that continue each other in all tensors are merged. */
typedef struct opjit_elements {
    int64_t numel;
    int64_t dim;                                        /* at least 1 */
    int64_t sizes[OPJIT_MAX_DIM];                       /* outermost first */
    int64_t strides[OPJIT_MAX_DIM][OPJIT_MAX_OPERANDS]; /* in elements, 0 if a tensor is broadcast */
    void *data[OPJIT_MAX_OPERANDS];
    int64_t bytes[OPJIT_MAX_OPERANDS]; /* of an element */
    int operands;
} opjit_elements;

/* One or two tensors in row-major order. For memory order, use opjit_elements_of() in opjit_elementwise.h. */
opjit_elements opjit_in_order(const opjit_tensor *x, const opjit_tensor *y);

/* A walk over rows, which are the innermost dimension: the row's first element, its end, and the walk's end. */
typedef struct opjit_walk {
    int64_t i, row_end, end;
    int64_t at[OPJIT_MAX_OPERANDS];    /* offset of the row's start in each tensor, in elements */
    int64_t steps[OPJIT_MAX_OPERANDS]; /* the stride of the row in each tensor */
    int64_t index[OPJIT_MAX_DIM];      /* of the row's first element */
} opjit_walk;

opjit_walk opjit_walk_of(const opjit_elements *e, int64_t begin, int64_t end);

OPJIT_INLINE void opjit_next_row(opjit_walk *w, const opjit_elements *e, int operands)
{
    const int64_t inner = e->dim - 1;
    w->i = w->row_end;
    w->row_end = w->end - w->i < e->sizes[inner] ? w->end : w->i + e->sizes[inner];
    for (int k = 0; k < operands; k++)
        w->at[k] -= w->index[inner] * w->steps[k]; /* the first row may have started inside */
    w->index[inner] = 0;
    for (int64_t d = inner - 1; d >= 0; d--) {
        for (int k = 0; k < operands; k++)
            w->at[k] += e->strides[d][k];
        if (++w->index[d] < e->sizes[d])
            return;
        for (int k = 0; k < operands; k++)
            w->at[k] -= e->strides[d][k] * e->sizes[d];
        w->index[d] = 0;
    }
}

/*
 * Return the offset of element `index`, counted in row-major order, from data, in elements. Use it for single elements.
 * It divides once per dimension, so in a loop over a tensor that is not contiguous, OPJIT_FOR_EACH is 4 to 40 times
 * faster.
 */
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

#ifdef __cplusplus
}
#endif

/*
 * Sizes as two arguments, their number and their values: opjit_empty(out, OPJIT_SIZES(n, m), x->dtype, x). C++ lacks
 * compound literals.
 */
#ifdef __cplusplus
template <int count>
struct opjit_sizes {
    int64_t values[count];
};
template <typename... integers>
static inline opjit_sizes<sizeof...(integers)> opjit_sizes_of(integers... values)
{
    return {{(int64_t)values...}};
}
#define OPJIT_SIZES(...) \
    (int64_t)(sizeof(opjit_sizes_of(__VA_ARGS__)) / sizeof(int64_t)), opjit_sizes_of(__VA_ARGS__).values
#else
#define OPJIT_SIZES(...) \
    (int64_t)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (const int64_t[]) \
    { \
        __VA_ARGS__ \
    }
#endif

#endif
