/*
 * opjit_caffe.h - Caffe's CUDA macros, so that kernels written with them compile without an edit.
 *
 *     #include "opjit_caffe.h"
 *
 *     __global__ void round_kernel(const int n, const float *bottom_data, float *top_data)
 *     {
 *         CUDA_KERNEL_LOOP(i, n) { top_data[i] = bottom_data[i] > 0.5f ? 1 : 0; }
 *     }
 *
 *     void round_forward(const float *bottom_data, float *top_data, int count, cudaStream_t stream)
 *     {
 *         round_kernel<<<CAFFE_GET_BLOCKS(count), CAFFE_CUDA_NUM_THREADS, 0, stream>>>(count, bottom_data, top_data);
 *         CUDA_POST_KERNEL_CHECK;
 *     }
 *
 *     opjit_status round_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
 *     {
 *         OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "round takes a contiguous float32 tensor");
 *         OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
 *         round_forward((const float *)x->data, (float *)out->data, (int)x->numel, stream);
 *         return OPJIT_LAUNCHED();
 *     }
 *
 * Caffe's checks end the process. Here, you can use them in functions that return nothing. The first error is kept with
 * its line, and OPJIT_LAUNCHED() returns it, so the op must end with OPJIT_LAUNCHED(). The code after a failed check
 * runs.
 */
#ifndef OPJIT_CAFFE_H
#define OPJIT_CAFFE_H

#include "opjit_cuda.h"

/* Caffe's device_alternate.hpp, which has these macros, adds nothing if it is included later. */
#ifndef CAFFE_UTIL_DEVICE_ALTERNATE_H_
#define CAFFE_UTIL_DEVICE_ALTERNATE_H_
#endif

/* Another header with these macros may be included before. */
#undef CUDA_KERNEL_LOOP
#undef CAFFE_CUDA_NUM_THREADS
#undef CAFFE_GET_BLOCKS
#undef CUDA_CHECK
#undef CUDA_POST_KERNEL_CHECK

/* The index has 64 bits, unlike Caffe's, so more than 2^31 elements are fine. */
#define CUDA_KERNEL_LOOP(i, n) OPJIT_KERNEL_LOOP(i, n)

#define CAFFE_CUDA_NUM_THREADS 512
#define CAFFE_GET_BLOCKS(n) opjit_blocks((n), CAFFE_CUDA_NUM_THREADS)

#define CUDA_CHECK(call_) opjit_caffe_check((call_), __FILE__, __LINE__, #call_)
#define CUDA_POST_KERNEL_CHECK opjit_caffe_check(cudaGetLastError(), __FILE__, __LINE__, "kernel launch")

#undef OPJIT_LAUNCHED
#define OPJIT_LAUNCHED() opjit_caffe_launched(__FILE__, __LINE__)

/* The first error of this thread's call. */
OPJIT_UNUSED static opjit_status *opjit_caffe_error(void)
{
    static thread_local opjit_status error = OPJIT_OK;
    return &error;
}

OPJIT_UNUSED static void opjit_caffe_check(cudaError_t error, const char *file, int line, const char *what)
{
    if (error != cudaSuccess && *opjit_caffe_error() == OPJIT_OK)
        *opjit_caffe_error() = opjit_cuda_status(error, file, line, what);
}

OPJIT_MUST_USE OPJIT_UNUSED static opjit_status opjit_caffe_launched(const char *file, int line)
{
    opjit_caffe_check(cudaGetLastError(), file, line, "kernel launch");
    opjit_status first = *opjit_caffe_error();
    *opjit_caffe_error() = OPJIT_OK;
    return first;
}

#endif
