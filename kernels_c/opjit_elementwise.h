/*
 * opjit_elementwise.h - for ops that work element by element: any strides, sizes that broadcast, dtypes that differ.
 *
 *     #include "opjit_elementwise.h"
 *
 *     static void subtract(int64_t n, void *const *data, const int64_t *strides, const void *context)
 *     {
 *         float *to = (float *)data[0];
 *         const float *a = (const float *)data[1], *b = (const float *)data[2];
 *         (void)context;
 *         for (int64_t i = 0; i < n; i++)
 *             to[i * strides[0]] = a[i * strides[1]] - b[i * strides[2]];
 *     }
 *
 *     opjit_status subtract_cpu(const opjit_tensor *a, const opjit_tensor *b, opjit_tensor *out)
 *     {
 *         opjit_elements elements;
 *         OPJIT_CHECK(a->dtype == OPJIT_FLOAT32 && b->dtype == OPJIT_FLOAT32, "subtract takes float32");
 *         OPJIT_TRY(opjit_empty_broadcast(out, a, b, OPJIT_FLOAT32));
 *         OPJIT_TRY(opjit_elements_of(&elements, 3, (const opjit_tensor *[]){out, a, b}));
 *         return opjit_for_rows(&elements, subtract, NULL);
 *     }
 *
 * A row is as long as the strides allow: dense tensors of one layout are a single row, whatever their dimensions, and
 * it is cut only for threads. A row function does well to have a loop of its own for strides of 1, which the compiler
 * turns into vector instructions, or vectors by hand (OPJIT_MAP_VECTORS).
 *
 * In a .cu file, opjit_map() runs a function over the elements, 16 bytes at a time where they are dense:
 *
 *     struct subtract {
 *         enum { inputs = 2, outputs = 1 };
 *         __device__ void operator()(const float *x, float *y) const { y[0] = x[0] - x[1]; }
 *     };
 *     ...
 *         return opjit_map<float>(&elements, subtract(), stream);
 *
 * Contents: 1 results  2 elements  3 vectors and rows on the CPU  4 elements on CUDA
 */
#ifndef OPJIT_ELEMENTWISE_H
#define OPJIT_ELEMENTWISE_H

#ifdef __CUDACC__
#include "opjit_cuda.h"
#else
#include "opjit.h"
#endif

/* ---------------------------------------------------------------------------------------------- */
/* 1. Results                                                                                     */

/* A tensor's size in the d-th of the `dim` dimensions that it broadcasts to: sizes are matched from the last one. */
OPJIT_UNUSED static int64_t opjit_size_among(const opjit_tensor *t, int64_t dim, int64_t d)
{
    return d < dim - t->dim ? 1 : t->sizes[d - dim + t->dim];
}

/*
 * An output for two tensors that belong together element by element: of the sizes that both broadcast to, or an error
 * that names two that disagree. It lies like the first tensor that has these sizes (torch.empty_like), so that tensors of
 * one layout keep it, and is contiguous where neither has them.
 */
OPJIT_MUST_USE OPJIT_UNUSED static opjit_status opjit_empty_broadcast(opjit_tensor *out, const opjit_tensor *a,
                                                                      const opjit_tensor *b, opjit_dtype dtype)
{
    int64_t sizes[OPJIT_MAX_DIM], dim = a->dim > b->dim ? a->dim : b->dim;
    bool like_a = a->dim == dim, like_b = b->dim == dim;
    OPJIT_CHECK(dim <= OPJIT_MAX_DIM, "a tensor has at most %d dimensions", OPJIT_MAX_DIM);
    for (int64_t d = 0; d < dim; d++) {
        int64_t of_a = opjit_size_among(a, dim, d), of_b = opjit_size_among(b, dim, d);
        OPJIT_CHECK(of_a == of_b || of_a == 1 || of_b == 1,
                    "expected sizes that broadcast: equal or 1 in each dimension, counted from the last; dimension %lld "
                    "has %lld in one tensor and %lld in the other",
                    (long long)(d - dim), (long long)of_a, (long long)of_b);
        sizes[d] = of_a == 1 ? of_b : of_a;
        like_a = like_a && of_a == sizes[d];
        like_b = like_b && of_b == sizes[d];
    }
    if (like_a || like_b)
        return opjit_empty_like(out, like_a ? a : b, dtype);
    return opjit_empty(out, dim, sizes, dtype, a);
}

/* The dtype that holds both dtypes' values, as torch.promote_types. */
OPJIT_MUST_USE OPJIT_UNUSED static opjit_status opjit_promote(opjit_dtype a, opjit_dtype b, opjit_dtype *to)
{
    opjit_dtype low = a < b ? a : b, high = a < b ? b : a; /* the enum's order is nearly torch's */
    *to = high;
    if (low == high)
        return OPJIT_OK;
    OPJIT_CHECK(high < OPJIT_OTHER_DTYPE, "%s cannot be combined with another dtype; convert it with .to()",
                opjit_dtype_name(high));
    OPJIT_CHECK(high < OPJIT_UINT16 || high > OPJIT_UINT64,
                "%s and %s have no common dtype in torch; convert one of them with .to()", opjit_dtype_name(a),
                opjit_dtype_name(b));
    if (low == OPJIT_UINT8 && high == OPJIT_INT8)
        *to = OPJIT_INT16;
    else if (low == OPJIT_FLOAT16 && high == OPJIT_BFLOAT16)
        *to = OPJIT_FLOAT32;
    else if (low == OPJIT_FLOAT64 && high == OPJIT_COMPLEX64)
        *to = OPJIT_COMPLEX128;
    return OPJIT_OK;
}

/*
 * The dtype of a binary op's result, as torch.result_type: a tensor without dimensions only decides where its kind
 * (bool, integer, floating, complex) is above the other's.
 */
OPJIT_MUST_USE OPJIT_UNUSED static opjit_status opjit_result_dtype(const opjit_tensor *a, const opjit_tensor *b,
                                                                   opjit_dtype *to)
{
    opjit_dtype strong = a->dim > 0 ? a->dtype : b->dtype, weak = a->dim > 0 ? b->dtype : a->dtype;
    *to = strong;
    if (strong == weak)
        return OPJIT_OK;
    if ((a->dim > 0) == (b->dim > 0) || strong == OPJIT_BOOL || (opjit_is_integral(strong) && !opjit_is_integral(weak)) ||
        weak == OPJIT_OTHER_DTYPE || strong == OPJIT_OTHER_DTYPE)
        return opjit_promote(a->dtype, b->dtype, to);
    if (opjit_is_floating(strong) && weak >= OPJIT_COMPLEX64) /* of the strong one's precision */
        *to = strong == OPJIT_FLOAT64   ? OPJIT_COMPLEX128
              : strong == OPJIT_FLOAT32 ? OPJIT_COMPLEX64
                                        : OPJIT_OTHER_DTYPE;
    return OPJIT_OK;
}

/* Compiled with every op that includes it, while somebody waits: nothing here gains by more than this. */
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#pragma GCC push_options
#pragma GCC optimize "Og"
#endif

/* ---------------------------------------------------------------------------------------------- */
/* 2. Elements                                                                                    */

#define OPJIT_MAX_OPERANDS 4

/* Tensors whose elements belong together, as few dimensions as possible, in the memory order of the first. */
typedef struct opjit_elements {
    int64_t numel;
    int64_t dim;                                           /* at least 1 */
    int64_t sizes[OPJIT_MAX_DIM];                          /* outermost first */
    int64_t strides[OPJIT_MAX_DIM][OPJIT_MAX_OPERANDS];    /* in elements, 0 where a tensor is broadcast */
    void *data[OPJIT_MAX_OPERANDS];
    int64_t bytes[OPJIT_MAX_OPERANDS];                     /* of an element */
    int operands;
} opjit_elements;

/* Are all operands a plain array of numel elements, in the same order? */
OPJIT_UNUSED static bool opjit_is_packed(const opjit_elements *e)
{
    if (e->dim > 1)
        return false;
    for (int k = 0; k < e->operands; k++)
        if (e->strides[0][k] != 1)
            return false;
    return true;
}

/* Enter a dimension of tensors[0] in the order of its strides. */
OPJIT_UNUSED static void opjit_enter_dimension(opjit_elements *e, const opjit_tensor *const *tensors, int64_t d)
{
    const opjit_tensor *first = tensors[0];
    int64_t at = e->dim++;
    for (; at > 0 && e->strides[at - 1][0] < first->strides[d]; at--) {
        e->sizes[at] = e->sizes[at - 1];
        memcpy(e->strides[at], e->strides[at - 1], sizeof e->strides[at]);
    }
    e->sizes[at] = first->sizes[d];
    for (int k = 0; k < e->operands; k++) {
        int64_t own = d - first->dim + tensors[k]->dim; /* sizes are matched from the last one */
        e->strides[at][k] = own < 0 || tensors[k]->sizes[own] == 1 ? 0 : tensors[k]->strides[own];
    }
}

/* Make one of two neighbouring dimensions where the outer one continues the inner one in every operand. */
OPJIT_UNUSED static void opjit_merge_dimensions(opjit_elements *e)
{
    int64_t last = 0;
    for (int64_t d = 1; d < e->dim; d++) {
        bool continues = true;
        for (int k = 0; k < e->operands; k++)
            continues = continues && e->strides[last][k] == e->strides[d][k] * e->sizes[d];
        if (continues) {
            e->sizes[last] *= e->sizes[d];
        } else {
            last++;
            e->sizes[last] = e->sizes[d];
        }
        memcpy(e->strides[last], e->strides[d], sizeof e->strides[last]);
    }
    e->dim = last + 1;
}

/*
 * The elements of `count` tensors: the first, usually the output, has the sizes; the others broadcast to them. Where
 * dtypes are complex, opjit_split_complex() may follow.
 */
OPJIT_MUST_USE OPJIT_UNUSED static opjit_status opjit_elements_of(opjit_elements *e, int count,
                                                                  const opjit_tensor *const *tensors)
{
    bool packed = true;
    OPJIT_CHECK(count > 0 && count <= OPJIT_MAX_OPERANDS, "1 to %d tensors can be walked together, not %d",
                OPJIT_MAX_OPERANDS, count);
    e->operands = count;
    e->numel = tensors[0]->numel;
    e->dim = 1;
    e->sizes[0] = e->numel;
    for (int k = 0; k < count; k++) {
        e->data[k] = tensors[k]->data;
        e->bytes[k] = (int64_t)opjit_dtype_size(tensors[k]->dtype);
        e->strides[0][k] = 1;
        packed = packed && tensors[k]->contiguous && tensors[k]->numel == e->numel;
    }
    if (packed || e->numel <= 1)
        return OPJIT_OK;
    e->dim = 0;
    for (int64_t d = 0; d < tensors[0]->dim; d++)
        if (tensors[0]->sizes[d] != 1)
            opjit_enter_dimension(e, tensors, d);
    opjit_merge_dimensions(e);
    return OPJIT_OK;
}

/* Take every element, which must be complex, as two real ones that lie side by side. */
OPJIT_UNUSED static void opjit_split_complex(opjit_elements *e)
{
    int64_t inner = e->dim - 1;
    bool packed = opjit_is_packed(e);
    e->numel *= 2;
    for (int k = 0; k < e->operands; k++)
        e->bytes[k] /= 2;
    if (packed) {
        e->sizes[0] = e->numel;
        return;
    }
    for (int64_t d = 0; d <= inner; d++)
        for (int k = 0; k < e->operands; k++)
            e->strides[d][k] *= 2;
    e->sizes[e->dim] = 2;
    for (int k = 0; k < e->operands; k++)
        e->strides[e->dim][k] = 1;
    e->dim++;
    opjit_merge_dimensions(e);
}

#ifndef __CUDACC__
/* ---------------------------------------------------------------------------------------------- */
/* 3. Vectors and rows on the CPU                                                                 */

/* Bytes of a hardware register. */
#ifdef __AVX__
#define OPJIT_VECTOR_BYTES 32
#else
#define OPJIT_VECTOR_BYTES 16
#endif

/*
 * typedef OPJIT_VECTOR(float, OPJIT_VECTOR_BYTES) floats; a vector that lies at any address. gcc and clang compute with
 * vectors as with numbers: floats x, y; x + 2 * y. A comparison gives -1 and 0 as integers of the elements' size.
 */
#define OPJIT_VECTOR(type_, bytes_) type_ __attribute__((vector_size(bytes_), aligned(1), may_alias))

/*
 * to[i] = an expression of x = a[i] and y = b[i] for n elements that lie side by side, a vector at a time:
 *
 *     OPJIT_MAP_VECTORS(floats, n, to, a, b, x - y);
 *
 * Written by hand because it compiles in a tenth of the time that the compiler takes to vectorise a loop. The last vector
 * is the last ones of the elements, so some may be computed twice: `to` must not overlap with a and b. Elements that do
 * not fill a vector come one by one, as the first of a vector of zeros.
 */
#define OPJIT_MAP_VECTORS(vector_, n_, to_, a_, b_, ...) \
    do { \
        enum { opjit_size = sizeof *(to_), opjit_width = sizeof(vector_) }; \
        const char *opjit_a = (const char *)(a_), *opjit_b = (const char *)(b_); \
        char *opjit_to = (char *)(to_); \
        const int64_t opjit_bytes = (n_) * (int64_t)opjit_size; \
        int64_t opjit_i = 0; \
        if (opjit_bytes < opjit_width) { \
            typedef uint64_t opjit_words __attribute__((vector_size(opjit_width))); \
            for (; opjit_i < opjit_bytes; opjit_i += opjit_size) { \
                opjit_words opjit_x = {0}, opjit_y = {0}, opjit_z; \
                uint64_t opjit_word = 0; \
                memcpy(&opjit_word, opjit_a + opjit_i, opjit_size); \
                opjit_x[0] = opjit_word; \
                memcpy(&opjit_word, opjit_b + opjit_i, opjit_size); \
                opjit_y[0] = opjit_word; \
                const vector_ x = (vector_)opjit_x, y = (vector_)opjit_y; \
                (void)y; \
                opjit_z = (opjit_words)(__VA_ARGS__); \
                opjit_word = opjit_z[0]; \
                memcpy(opjit_to + opjit_i, &opjit_word, opjit_size); \
            } \
        } \
        for (; opjit_i + 2 * opjit_width <= opjit_bytes; opjit_i += 2 * opjit_width) { \
            OPJIT_MAP_VECTOR_(vector_, opjit_i, __VA_ARGS__) \
            OPJIT_MAP_VECTOR_(vector_, opjit_i + opjit_width, __VA_ARGS__) \
        } \
        for (; opjit_i < opjit_bytes; opjit_i += opjit_width) { \
            opjit_i = opjit_i + opjit_width > opjit_bytes ? opjit_bytes - opjit_width : opjit_i; \
            OPJIT_MAP_VECTOR_(vector_, opjit_i, __VA_ARGS__) \
        } \
    } while (0)
#define OPJIT_MAP_VECTOR_(vector_, at_, ...) \
    { \
        const vector_ x = *(const vector_ *)(opjit_a + (at_)), y = *(const vector_ *)(opjit_b + (at_)); \
        (void)y; \
        *(vector_ *)(opjit_to + (at_)) = (__VA_ARGS__); \
    }

#define OPJIT_GRAIN 32768 /* elements that are worth a thread, as torch counts them */

/* Work on n elements: those of operand k start at data[k] and lie strides[k] elements apart. */
typedef void opjit_row(int64_t n, void *const *data, const int64_t *strides, const void *context);

typedef struct opjit_rows {
    const opjit_elements *elements;
    opjit_row *row;
    const void *context;
} opjit_rows;

/* The rows, whole or cut, between two elements. */
OPJIT_UNUSED static opjit_status opjit_rows_between(int64_t begin, int64_t end, void *rows_)
{
    const opjit_rows *rows = (const opjit_rows *)rows_;
    const opjit_elements *e = rows->elements;
    const int64_t inner = e->dim - 1;
    int64_t at[OPJIT_MAX_DIM], index = begin;
    void *data[OPJIT_MAX_OPERANDS];
    for (int k = 0; k < e->operands; k++)
        data[k] = e->data[k];
    for (int64_t d = inner; d >= 0; d--) {
        at[d] = d > 0 ? index % e->sizes[d] : index;
        index /= e->sizes[d];
        for (int k = 0; k < e->operands; k++)
            data[k] = (char *)data[k] + at[d] * e->strides[d][k] * e->bytes[k];
    }
    for (;;) {
        int64_t n = e->sizes[inner] - at[inner], d = inner, step;
        n = n < end - begin ? n : end - begin;
        rows->row(n, data, e->strides[inner], rows->context);
        begin += n;
        if (begin == end)
            return OPJIT_OK;
        for (step = n; at[d] + step == e->sizes[d]; d--, step = 1) { /* never past the first: there are more elements */
            for (int k = 0; k < e->operands; k++)
                data[k] = (char *)data[k] - at[d] * e->strides[d][k] * e->bytes[k];
            at[d] = 0;
        }
        at[d] += step;
        for (int k = 0; k < e->operands; k++)
            data[k] = (char *)data[k] + step * e->strides[d][k] * e->bytes[k];
    }
}

/* Call row() for all elements, on torch's threads where they are many. */
OPJIT_MUST_USE OPJIT_UNUSED static opjit_status opjit_for_rows(const opjit_elements *e, opjit_row *row,
                                                               const void *context)
{
    opjit_rows rows;
    if (e->dim == 1 && e->numel <= OPJIT_GRAIN) {
        row(e->numel, e->data, e->strides[0], context);
        return OPJIT_OK;
    }
    rows.elements = e;
    rows.row = row;
    rows.context = context;
    return opjit_parallel_for(0, e->numel, OPJIT_GRAIN, opjit_rows_between, &rows);
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif

#else
/* ---------------------------------------------------------------------------------------------- */
/* 4. Elements on CUDA                                                                            */

#define OPJIT_MAP_THREADS 256
#define OPJIT_PACK_BYTES 16 /* the most that a thread loads or stores at once */

/* Neighbouring elements that are loaded and stored at once. */
template <typename element>
struct __align__(OPJIT_PACK_BYTES) opjit_pack {
    enum { width = OPJIT_PACK_BYTES / sizeof(element) };
    element at[width];
};

/* How many packs there are; 0 where the operands are not packed or do not start at a multiple of a pack's size. */
OPJIT_UNUSED static int64_t opjit_packs(const opjit_elements *e)
{
    for (int k = 0; k < e->operands; k++)
        if ((uintptr_t)e->data[k] % OPJIT_PACK_BYTES != 0)
            return 0;
    return opjit_is_packed(e) ? e->numel / (OPJIT_PACK_BYTES / e->bytes[0]) : 0;
}

template <int operands, typename index>
static __device__ void opjit_walk(const opjit_elements &e, index i, int64_t *at)
{
#pragma unroll
    for (int k = 0; k < operands; k++)
        at[k] = 0;
    for (int d = (int)e.dim - 1; d > 0; d--) {
        const index size = (index)e.sizes[d], outer = i / size, inner = i - outer * size;
#pragma unroll
        for (int k = 0; k < operands; k++)
            at[k] += (int64_t)inner * e.strides[d][k];
        i = outer;
    }
#pragma unroll
    for (int k = 0; k < operands; k++)
        at[k] += (int64_t)i * e.strides[0][k];
}

/* Where element i of each operand lies, counted in elements from its data: a thread's way through any strides. */
template <int operands>
static __device__ void opjit_offsets(const opjit_elements &e, int64_t i, int64_t *at)
{
    if (e.numel <= UINT32_MAX) /* a division of 64 bits takes several times as long */
        opjit_walk<operands>(e, (uint32_t)i, at);
    else
        opjit_walk<operands>(e, (uint64_t)i, at);
}

/* What the packed kernel has to know: the whole of opjit_elements would make each launch longer. */
struct opjit_packed {
    void *data[OPJIT_MAX_OPERANDS];
    int64_t packs, numel;
};

template <typename element, typename function>
static __global__ void __launch_bounds__(OPJIT_MAP_THREADS) opjit_map_packed(function f, const opjit_packed p)
{
    typedef opjit_pack<element> pack;
    const int inputs = function::inputs, outputs = function::outputs;
    OPJIT_KERNEL_LOOP(i, p.packs) {
        pack from[inputs], to[outputs];
#pragma unroll
        for (int k = 0; k < inputs; k++)
            from[k] = ((const pack *)p.data[outputs + k])[i];
#pragma unroll
        for (int j = 0; j < pack::width; j++) {
            element x[inputs], y[outputs];
#pragma unroll
            for (int k = 0; k < inputs; k++)
                x[k] = from[k].at[j];
            f(x, y);
#pragma unroll
            for (int k = 0; k < outputs; k++)
                to[k].at[j] = y[k];
        }
#pragma unroll
        for (int k = 0; k < outputs; k++)
            ((pack *)p.data[k])[i] = to[k];
    }
    const int64_t done = p.packs * pack::width;
    OPJIT_KERNEL_LOOP(i, p.numel - done) {
        element x[inputs], y[outputs];
        for (int k = 0; k < inputs; k++)
            x[k] = ((const element *)p.data[outputs + k])[done + i];
        f(x, y);
        for (int k = 0; k < outputs; k++)
            ((element *)p.data[k])[done + i] = y[k];
    }
}

template <typename element, typename function>
static __global__ void __launch_bounds__(OPJIT_MAP_THREADS)
    opjit_map_strided(function f, const __grid_constant__ opjit_elements e)
{
    const int inputs = function::inputs, outputs = function::outputs;
    OPJIT_KERNEL_LOOP(i, e.numel) {
        int64_t at[outputs + inputs];
        element x[inputs], y[outputs];
        opjit_offsets<outputs + inputs>(e, i, at);
#pragma unroll
        for (int k = 0; k < inputs; k++)
            x[k] = ((const element *)e.data[outputs + k])[at[outputs + k]];
        f(x, y);
#pragma unroll
        for (int k = 0; k < outputs; k++)
            ((element *)e.data[k])[at[k]] = y[k];
    }
}

/*
 * Call f(x, y) for all elements: x has those of the function::inputs last operands, y takes those of the
 * function::outputs first ones. All are of type `element`. This one takes packed operands only, and compiles in half the
 * time.
 */
template <typename element, typename function>
OPJIT_MUST_USE static opjit_status opjit_map_dense(const opjit_elements *e, function f, cudaStream_t stream)
{
    opjit_packed p;
    OPJIT_CHECK(opjit_is_packed(e) && e->operands == function::inputs + function::outputs,
                "expected %d packed operands", function::inputs + function::outputs);
    p.packs = opjit_packs(e);
    p.numel = e->numel;
    memcpy(p.data, e->data, sizeof p.data);
    if (e->numel > 0)
        opjit_map_packed<element><<<opjit_blocks(p.packs > 0 ? p.packs : p.numel, OPJIT_MAP_THREADS), OPJIT_MAP_THREADS, 0,
                                    stream>>>(f, p);
    return OPJIT_LAUNCHED();
}

/* The same with any strides. */
template <typename element, typename function>
OPJIT_MUST_USE static opjit_status opjit_map(const opjit_elements *e, function f, cudaStream_t stream)
{
    if (opjit_is_packed(e))
        return opjit_map_dense<element>(e, f, stream);
    OPJIT_CHECK(e->operands == function::inputs + function::outputs, "expected %d operands, not %d",
                function::inputs + function::outputs, e->operands);
    opjit_map_strided<element><<<opjit_blocks(e->numel, OPJIT_MAP_THREADS), OPJIT_MAP_THREADS, 0, stream>>>(f, *e);
    return OPJIT_LAUNCHED();
}
#endif

#endif
