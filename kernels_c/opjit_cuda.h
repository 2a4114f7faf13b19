/*
 * opjit_cuda.h - what a .cu file of an op needs besides opjit.h.
 *
 *     #include "opjit_cuda.h"
 *
 *     static __global__ void scale_kernel(const float *from, float *to, float a, int64_t n)
 *     {
 *         OPJIT_KERNEL_LOOP(i, n)
 *             to[i] = a * from[i];
 *     }
 *
 *     opjit_status scale_cuda(const opjit_tensor *x, double a, opjit_tensor *out, cudaStream_t stream)
 *     {
 *         OPJIT_CHECK(x->dtype == OPJIT_FLOAT32, "scale takes float32, not %s", opjit_dtype_name(x->dtype));
 *         OPJIT_CHECK(x->contiguous, "scale takes a contiguous tensor; call .contiguous() on it");
 *         OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
 *         if (x->numel == 0)
 *             return OPJIT_OK;
 *         scale_kernel<<<opjit_blocks(x->numel, 256), 256, 0, stream>>>((const float *)x->data, (float *)out->data,
 *                                                                      (float)a, x->numel);
 *         return OPJIT_LAUNCHED();
 *     }
 *
 * The device of the tensors is current and `stream` is torch's current stream on it: launch everything there,
 * never synchronise, and the op works under CUDA graphs and on any stream. opjit_scratch() gives device memory
 * that is safe to use until the call's kernels have run. No extern "C" is needed.
 *
 * Debugging: printf in a __global__ function keeps its text on the device until a synchronisation, which writes it to
 * the standard output's file descriptor: torch.cuda.synchronize() in Python, or behind the launch, for the time of it,
 *
 *     OPJIT_CUDA_CHECK(cudaStreamSynchronize(stream));
 *     opjit_printf("scale done\n"); // of opjit_printf.h: the device's lines come before this one
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

#endif
