/*
 * opjit_cuda.h - additional declarations for the .cu files of ops.
 *
 *     #include "opjit_cuda.h"
 *
 *     static __global__ void scale_kernel(const float *from, const opjit_layout layout, float *to, float a, int64_t n)
 *     {
 *         OPJIT_KERNEL_LOOP(i, n)
 *             to[i] = a * from[opjit_offset(layout, i)];
 *     }
 *
 *     opjit_status scale_cuda(const opjit_tensor *x, double a, opjit_tensor *out, cudaStream_t stream)
 *     {
 *         OPJIT_CHECK(x->dtype == OPJIT_FLOAT32, "scale takes float32, not %s", opjit_dtype_name(x->dtype));
 *         OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
 *         scale_kernel<<<opjit_blocks(x->numel, 256), 256, 0, stream>>>(
 *             (const float *)x->data, opjit_layout_of(x), (float *)out->data, (float)a, x->numel);
 *         return OPJIT_LAUNCHED();
 *     }
 *
 * The tensors' device is current, and `stream` is torch's current stream on it. Launch everything there and never
 * synchronize, so that the op works under CUDA graphs and on any stream. opjit_scratch() returns device memory that
 * stays valid until the kernels of the call have run. You don't need extern "C".
 *
 * Debugging: the device keeps the text of printf in a __global__ function until the next synchronization, and then
 * writes it to the file descriptor of the standard output. Call torch.cuda.synchronize() in Python or, when you debug,
 * synchronize after the launch:
 *
 *     OPJIT_CUDA_CHECK(cudaStreamSynchronize(stream));
 *     opjit_printf("scale done\n"); // from opjit_printf.h: appears after the device's lines
 */
#ifndef OPJIT_CUDA_H
#define OPJIT_CUDA_H

#include <cuda_runtime.h>

#include "opjit.h"

/* Return an error when a CUDA call fails: OPJIT_CUDA_CHECK(cudaMemcpyAsync(...)). */
#define OPJIT_CUDA_CHECK(call_) OPJIT_TRY(opjit_cuda_status((call_), __FILE__, __LINE__, #call_))

/* The result of the launches above: `return OPJIT_LAUNCHED();` or OPJIT_TRY(OPJIT_LAUNCHED()). */
#define OPJIT_LAUNCHED() opjit_cuda_status(cudaGetLastError(), __FILE__, __LINE__, "kernel launch")

OPJIT_MUST_USE OPJIT_UNUSED static opjit_status opjit_cuda_status(cudaError_t error, const char *file, int line,
                                                                  const char *what)
{
    if (error == cudaSuccess)
        return OPJIT_OK;
    (void)cudaGetLastError(); /* so that the next call does not report it again */
    return opjit_error_new(file, line, "CUDA error: %s (%s) in %s", cudaGetErrorString(error), cudaGetErrorName(error),
                           what);
}

/* A grid-stride loop: visit 0 <= i < n once, with any grid size. */
#define OPJIT_KERNEL_LOOP(i, n) \
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (int64_t)gridDim.x * blockDim.x)

/* Blocks for OPJIT_KERNEL_LOOP: enough for n threads, at most 65535 (the loop visits the rest), and 1 for n = 0. */
OPJIT_UNUSED static int opjit_blocks(int64_t n, int threads)
{
    int64_t blocks = (n + threads - 1) / threads;
    return blocks < 1 ? 1 : blocks > 65535 ? 65535 : (int)blocks;
}

/* Multiprocessors of the current device (cached by the CUDA runtime; a few tens of nanoseconds). */
OPJIT_MUST_USE OPJIT_UNUSED static opjit_status opjit_multiprocessors(int *count)
{
    int device;
    OPJIT_CUDA_CHECK(cudaGetDevice(&device));
    OPJIT_CUDA_CHECK(cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device));
    return OPJIT_OK;
}

/* Sizes and strides that a kernel gets by value, because a tensor has them in host memory. Outermost first. */
typedef struct opjit_layout {
    int64_t dim;
    int64_t sizes[OPJIT_MAX_DIM];
    int64_t strides[OPJIT_MAX_DIM];
} opjit_layout;

/* Layout of the first tensor in a set that a kernel visits together. */
OPJIT_UNUSED static opjit_layout opjit_layout_of(const opjit_elements *e)
{
    opjit_layout layout;
    layout.dim = e->dim;
    for (int64_t d = 0; d < layout.dim; d++) {
        layout.sizes[d] = e->sizes[d];
        layout.strides[d] = e->strides[d][0];
    }
    return layout;
}

/* Layout of a tensor in row-major order, in as few dimensions as possible. */
OPJIT_UNUSED static opjit_layout opjit_layout_of(const opjit_tensor *t)
{
    const opjit_elements e = opjit_in_order(t, NULL);
    return opjit_layout_of(&e);
}

/* Split off the innermost dimension of an index. nvcc divides in 32 bits if both numbers fit. */
OPJIT_UNUSED static __device__ int64_t opjit_split_index(int64_t *index, int64_t size)
{
    const uint64_t outer = (uint64_t)*index / (uint64_t)size;
    const int64_t inner = *index - (int64_t)outer * size;
    *index = (int64_t)outer;
    return inner;
}

/* Offset of element `index` in each operand. strides[d][k] is the stride of operand k in dimension d. */
template <int operands, int columns>
static __device__ void opjit_places(int dim, const int64_t *sizes, const int64_t (*strides)[columns], int64_t index,
                                    int64_t *at)
{
#pragma unroll
    for (int k = 0; k < operands; k++)
        at[k] = 0;
#pragma unroll 1
    for (int d = dim - 1; d > 0; d--) {
        const int64_t inner = opjit_split_index(&index, sizes[d]);
#pragma unroll
        for (int k = 0; k < operands; k++)
            at[k] += inner * strides[d][k];
    }
#pragma unroll
    for (int k = 0; k < operands; k++)
        at[k] += index * strides[0][k];
}

/* The same as opjit_offset() on the host: the offset of element `index`, counted in row-major order. */
OPJIT_UNUSED static __device__ int64_t opjit_offset(const opjit_layout &layout, int64_t index)
{
    int64_t at;
    opjit_places<1>((int)layout.dim, layout.sizes, (const int64_t (*)[1])layout.strides, index, &at);
    return at;
}

#endif
