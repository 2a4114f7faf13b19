/*
 * opjit_cuda.h - what a .cu file of an op needs besides opjit.h.
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
 * synchronise: then the op works under CUDA graphs and on any stream. opjit_scratch() gives device memory that stays valid
 * until the call's kernels have run. No extern "C" is needed.
 *
 * Debugging: the device keeps the text of printf in a __global__ function until the next synchronisation, then writes it to
 * the standard output's file descriptor. Call torch.cuda.synchronize() in Python or, while debugging, after the launch:
 *
 *     OPJIT_CUDA_CHECK(cudaStreamSynchronize(stream));
 *     opjit_printf("scale done\n"); // of opjit_printf.h: comes after the device's lines
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

/* Visit 0 <= i < n once over the whole grid, whatever its size. */
#define OPJIT_KERNEL_LOOP(i, n) \
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (int64_t)gridDim.x * blockDim.x)

/* Blocks for OPJIT_KERNEL_LOOP: enough for n threads, at most 65535 (the loop takes the rest); 1 for n = 0. */
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

/* A tensor's sizes and strides to pass to a kernel by value: its own are in host memory. */
OPJIT_UNUSED static opjit_layout opjit_layout_of(const opjit_tensor *t)
{
    opjit_layout layout;
    layout.dim = t->contiguous ? 1 : t->dim;
    for (int64_t d = 0; d < layout.dim; d++) {
        layout.sizes[d] = t->contiguous ? t->numel : t->sizes[d];
        layout.strides[d] = t->contiguous ? 1 : t->strides[d];
    }
    return layout;
}

/* Split off the innermost dimension of an index. nvcc divides in 32 bits where both numbers fit. */
OPJIT_UNUSED static __device__ int64_t opjit_split_index(int64_t *index, int64_t size)
{
    const uint64_t outer = (uint64_t)*index / (uint64_t)size;
    const int64_t inner = *index - (int64_t)outer * size;
    *index = (int64_t)outer;
    return inner;
}

/* In a kernel, as opjit_offset() on the host: where element `index`, counted in row-major order, lies. */
OPJIT_UNUSED static __device__ int64_t opjit_offset(const opjit_layout &layout, int64_t index)
{
    int64_t offset = 0;
#pragma unroll 1
    for (int d = (int)layout.dim - 1; d > 0; d--)
        offset += opjit_split_index(&index, layout.sizes[d]) * layout.strides[d];
    return offset + index * layout.strides[0];
}

#endif
