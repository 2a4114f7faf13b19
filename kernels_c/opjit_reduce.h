/*
 * opjit_reduce.h - reduce the values of a warp's or a block's threads to one value, in a .cu file.
 *
 *     #include "opjit_reduce.h"
 *
 *     static __global__ void row_sums(const float *x, float *out, int64_t columns)
 *     {
 *         float sum = 0;
 *         for (int64_t i = threadIdx.x; i < columns; i += blockDim.x)
 *             sum += x[blockIdx.x * columns + i];
 *         sum = opjit_block_reduce(sum, opjit_add());
 *         if (threadIdx.x == 0)
 *             out[blockIdx.x] = sum;
 *     }
 *     ...
 *         row_sums<<<rows, 256, 0, stream>>>(...);
 *
 * All threads of the warp or block must call it, and all get the result. For a given number of threads, the order of
 * additions is fixed, so the same input gives the same bits. You can use opjit_add, opjit_maximum, opjit_minimum, or
 * any struct with a call operator like theirs. For other algorithms, for example sort, scan and histogram, use CUB,
 * which ships with CUDA: #include <cub/cub.cuh>.
 */
#ifndef OPJIT_REDUCE_H
#define OPJIT_REDUCE_H

#include "opjit_cuda.h"

struct opjit_add {
    template <typename value>
    __device__ value operator()(value a, value b) const
    {
        return a + b;
    }
};

/* NaN if a value is NaN, like in torch. */
struct opjit_maximum {
    template <typename value>
    __device__ value operator()(value a, value b) const
    {
        return a > b || a != a ? a : b;
    }
};

struct opjit_minimum {
    template <typename value>
    __device__ value operator()(value a, value b) const
    {
        return a < b || a != a ? a : b;
    }
};

/* Reduce the values of the 32 threads of a warp. The type must be valid for __shfl_xor_sync. */
template <typename value, typename function>
static __device__ value opjit_warp_reduce(value x, function f)
{
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        x = f(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

/* Reduce the values of the threads of a block. The number of threads must be a multiple of 32, in any dimensions. */
template <typename value, typename function>
static __device__ value opjit_block_reduce(value x, function f)
{
    __shared__ value of_warp[32];
    const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const unsigned warps = blockDim.x * blockDim.y * blockDim.z / 32;
    x = opjit_warp_reduce(x, f);
    __syncthreads(); /* because threads may still read the values of the previous call */
    if (thread % 32 == 0)
        of_warp[thread / 32] = x;
    __syncthreads();
    x = of_warp[thread % 32 < warps ? thread % 32 : 0];
#pragma unroll
    for (unsigned step = 1; step < 32; step *= 2) {
        const value other = __shfl_down_sync(0xffffffffu, x, step);
        if (thread % 32 + step < warps)
            x = f(x, other);
    }
    return __shfl_sync(0xffffffffu, x, 0);
}

#endif
