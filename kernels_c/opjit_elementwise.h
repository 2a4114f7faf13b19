/*
 * opjit_elementwise.h - elementwise ops with any strides, broadcast sizes and different dtypes.
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
 * A row is as long as the strides allow. Dense tensors with the same layout are a single row, for any number of
 * dimensions, and are split only between threads. The compiler vectorizes a simple loop for strides of 1.
 *
 * In a .cu file, opjit_map() applies a function to the elements, 16 bytes at a time if they are packed:
 *
 *     struct subtract {
 *         enum { inputs = 2, outputs = 1 };
 *         __device__ void operator()(const float *x, float *y) const { y[0] = x[0] - x[1]; }
 *     };
 *     ...
 *         return opjit_map<float>(&elements, subtract(), stream);
 *
 * Contents: 1 results  2 elements  3 rows on the CPU  4 elements on CUDA. For operands of different dtypes,
 * see opjit_convert.h. The C functions are in opjit_elementwise.c, which is linked to every op.
 */
#ifndef OPJIT_ELEMENTWISE_H
#define OPJIT_ELEMENTWISE_H

#ifdef __CUDACC__
#include "opjit_pack.h"
#else
#include "opjit.h"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------------------------------------- */
/* 1. Results                                                                                     */

/*
 * Create the output of two tensors that broadcast, or return an error that names the two sizes. The output has the
 * strides of torch.empty_like for the first tensor with its sizes. If neither tensor has its sizes, it is contiguous.
 */
OPJIT_MUST_USE opjit_status opjit_empty_broadcast(opjit_tensor *out, const opjit_tensor *a, const opjit_tensor *b,
                                                  opjit_dtype dtype);

/* torch.promote_types: the dtype that can represent the values of both. */
OPJIT_MUST_USE opjit_status opjit_promote(opjit_dtype a, opjit_dtype b, opjit_dtype *to);

/*
 * torch.result_type: the dtype of a binary op's result. A tensor without dimensions counts only if its kind (bool,
 * integer, floating, complex) is higher than the kind of the other tensor.
 */
OPJIT_MUST_USE opjit_status opjit_result_dtype(const opjit_tensor *a, const opjit_tensor *b, opjit_dtype *to);

/* ---------------------------------------------------------------------------------------------- */
/* 2. Elements                                                                                    */

/*
 * The elements of `count` tensors in the memory order of the first one, usually the output. The other tensors broadcast
 * to its sizes. If you pass only one dense tensor, it becomes a single dimension, even if it is transposed.
 */
OPJIT_MUST_USE opjit_status opjit_elements_of(opjit_elements *e, int count, const opjit_tensor *const *tensors);

/* Treat each complex element as two neighboring real elements. */
void opjit_split_complex(opjit_elements *e);

/* Return whether every operand is a plain array of numel elements in the same order. */
OPJIT_INLINE bool opjit_is_packed(const opjit_elements *e)
{
    bool packed = e->dim == 1;
    for (int k = 0; k < e->operands; k++)
        packed = packed && e->strides[0][k] == 1;
    return packed;
}

/* ---------------------------------------------------------------------------------------------- */
/* 3. Rows on the CPU                                                                             */

#define OPJIT_GRAIN 32768 /* elements that are worth a thread, the same as in torch */

/* Process n elements. Operand k starts at data[k], and its elements are strides[k] elements apart. */
typedef void opjit_row(int64_t n, void *const *data, const int64_t *strides, const void *context);

/* Call row() for all elements, on torch's threads if there are many. */
OPJIT_MUST_USE opjit_status opjit_for_rows(const opjit_elements *e, opjit_row *row, const void *context);

/* Call row() for the elements from `begin` to `end` in this thread. The first and the last row may be partial. */
void opjit_rows_between(const opjit_elements *e, int64_t begin, int64_t end, opjit_row *row, const void *context);

#ifdef __cplusplus
}
#endif

#ifdef __CUDACC__
/* ---------------------------------------------------------------------------------------------- */
/* 4. Elements on CUDA                                                                            */

#define OPJIT_MAP_THREADS 256

/* The number of packs. It is 0 if an operand isn't packed or doesn't start at a multiple of a pack's size. */
OPJIT_UNUSED static int64_t opjit_packs(const opjit_elements *e)
{
    for (int k = 0; k < e->operands; k++)
        if (!opjit_is_aligned(e->data[k], OPJIT_PACK_BYTES))
            return 0;
    return opjit_is_packed(e) ? e->numel / (OPJIT_PACK_BYTES / e->bytes[0]) : 0;
}

/* Offset of element i in each operand, in elements. */
template <int operands>
static __device__ void opjit_offsets(const opjit_elements &e, int64_t i, int64_t *at)
{
    opjit_places<operands>((int)e.dim, e.sizes, e.strides, i, at);
}

/* Visit the packs and then the remaining elements. If the elements aren't packed, visit all by their strides. */
template <typename element, typename function>
static __global__ void __launch_bounds__(OPJIT_MAP_THREADS)
    opjit_map_kernel(const function f, const __grid_constant__ opjit_elements e, const int64_t packs)
{
    typedef opjit_pack<element> pack;
    const int inputs = function::inputs, outputs = function::outputs;
    const int64_t done = packs * pack::width;
    element x[inputs], y[outputs];
    OPJIT_KERNEL_LOOP(i, packs) {
        pack from[inputs], to[outputs];
#pragma unroll
        for (int k = 0; k < inputs; k++)
            from[k] = ((const pack *)e.data[outputs + k])[i];
#pragma unroll
        for (int j = 0; j < pack::width; j++) {
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
            ((pack *)e.data[k])[i] = to[k];
    }
    OPJIT_KERNEL_LOOP(i, e.numel - done) {
        int64_t at[outputs + inputs];
        opjit_offsets<outputs + inputs>(e, done + i, at);
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
 * Call f(x, y) for all elements. x has the elements of the last function::inputs operands, and f writes the elements of
 * the first function::outputs operands to y. All operands have elements of type `element`.
 */
template <typename element, typename function>
OPJIT_MUST_USE static opjit_status opjit_map(const opjit_elements *e, function f, cudaStream_t stream)
{
    const int64_t packs = opjit_packs(e);
    const int blocks = opjit_blocks(packs > 0 ? packs : e->numel, OPJIT_MAP_THREADS);
    OPJIT_CHECK(e->operands == function::inputs + function::outputs, "expected %d operands, not %d",
                function::inputs + function::outputs, e->operands);
    if (e->numel > 0)
        opjit_map_kernel<element><<<blocks, OPJIT_MAP_THREADS, 0, stream>>>(f, *e, packs);
    return OPJIT_LAUNCHED();
}
#endif

#endif
