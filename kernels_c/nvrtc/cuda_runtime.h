/*
 * cuda_runtime.h - CUDA's, for the host's part of a split .cu file, which a C++ compiler reads instead of nvcc.
 *
 * The CUDA runtime's API, and what nvcc itself would add: how a launch reaches the runtime. CUDA's header of this name
 * also declares the device's functions, so it compiles three times slower and needs nvcc's internal headers.
 */
#ifndef OPJIT_CUDA_RUNTIME_H
#define OPJIT_CUDA_RUNTIME_H

/* <math.h> and <stdlib.h> of C: The headers of C++ cost 0.1 s, so the including file includes them if it calls their
 * functions. */
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS

#include <cuda_runtime_api.h>
#include <library_types.h>
#include <vector_functions.h>

#undef __host__
#undef __device__
#undef __global__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#undef __cluster_dims__
#undef __block_size__
#undef __maxnreg__
#undef __grid_constant__
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __block_size__(...)
#define __maxnreg__(...)
#define __grid_constant__

extern const int warpSize; /* in default arguments of the device's functions */

/* The runtime's entry points for code that nvcc generates. clang's CUDA support also calls them. */
extern "C" unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared = 0, cudaStream_t stream = 0);
extern "C" cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream);

/* The body of a kernel on the host. `kernel` is the stub's address, under which opjit_fatbin.c has registered it. */
static inline void opjit_launch(const void *kernel, void **arguments)
{
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
    if (__cudaPopCallConfiguration(&grid, &block, &shared, &stream) == cudaSuccess)
        (void)cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

/* cuda_runtime.h's overloads that take a kernel, a variable or a typed pointer instead of a void pointer. */
template <typename value>
static inline cudaError_t cudaMalloc(value **memory, size_t bytes)
{
    return cudaMalloc((void **)memory, bytes);
}

template <typename value>
static inline cudaError_t cudaMallocAsync(value **memory, size_t bytes, cudaStream_t stream)
{
    return cudaMallocAsync((void **)memory, bytes, stream);
}

template <typename value>
static inline cudaError_t cudaMallocHost(value **memory, size_t bytes, unsigned flags = 0)
{
    return cudaHostAlloc((void **)memory, bytes, flags);
}

template <typename value>
static inline cudaError_t cudaMallocManaged(value **memory, size_t bytes, unsigned flags = cudaMemAttachGlobal)
{
    return cudaMallocManaged((void **)memory, bytes, flags);
}

template <typename kernel>
static inline cudaError_t cudaFuncSetAttribute(kernel *function, cudaFuncAttribute attribute, int value)
{
    return cudaFuncSetAttribute((const void *)function, attribute, value);
}

template <typename kernel>
static inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, kernel *function)
{
    return cudaFuncGetAttributes(attributes, (const void *)function);
}

template <typename kernel>
static inline cudaError_t cudaFuncSetCacheConfig(kernel *function, cudaFuncCache config)
{
    return cudaFuncSetCacheConfig((const void *)function, config);
}

template <typename kernel>
static inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, kernel *function, int threads,
                                                                        size_t shared)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, (const void *)function, threads, shared);
}

template <typename kernel>
static inline cudaError_t cudaLaunchKernel(kernel *function, dim3 grid, dim3 block, void **arguments, size_t shared = 0,
                                           cudaStream_t stream = 0)
{
    return cudaLaunchKernel((const void *)function, grid, block, arguments, shared, stream);
}

template <typename kernel>
static inline cudaError_t cudaLaunchCooperativeKernel(kernel *function, dim3 grid, dim3 block, void **arguments,
                                                      size_t shared = 0, cudaStream_t stream = 0)
{
    return cudaLaunchCooperativeKernel((const void *)function, grid, block, arguments, shared, stream);
}

template <typename... parameters, typename... given>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(parameters...),
                                             given &&...values)
{
    return [&](parameters... copies) {
        void *arguments[] = {(void *)&copies..., nullptr};
        return cudaLaunchKernelExC(config, (const void *)kernel, arguments);
    }(static_cast<given &&>(values)...);
}

template <typename variable>
static inline cudaError_t cudaMemcpyToSymbol(const variable &symbol, const void *from, size_t bytes, size_t offset = 0,
                                             cudaMemcpyKind kind = cudaMemcpyHostToDevice)
{
    return cudaMemcpyToSymbol((const void *)&symbol, from, bytes, offset, kind);
}

template <typename variable>
static inline cudaError_t cudaMemcpyToSymbolAsync(const variable &symbol, const void *from, size_t bytes, size_t offset,
                                                  cudaMemcpyKind kind, cudaStream_t stream = 0)
{
    return cudaMemcpyToSymbolAsync((const void *)&symbol, from, bytes, offset, kind, stream);
}

template <typename variable>
static inline cudaError_t cudaMemcpyFromSymbol(void *to, const variable &symbol, size_t bytes, size_t offset = 0,
                                               cudaMemcpyKind kind = cudaMemcpyDeviceToHost)
{
    return cudaMemcpyFromSymbol(to, (const void *)&symbol, bytes, offset, kind);
}

template <typename variable>
static inline cudaError_t cudaGetSymbolAddress(void **address, const variable &symbol)
{
    return cudaGetSymbolAddress(address, (const void *)&symbol);
}

template <typename number>
static inline number max(number a, number b)
{
    return a < b ? b : a;
}

template <typename number>
static inline number min(number a, number b)
{
    return b < a ? b : a;
}

namespace cooperative_groups
{
}

#endif
