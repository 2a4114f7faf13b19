/*
 * opjit_reduce.h - one value from those of a warp's or a block's threads, in a .cu file.
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
 * All threads of the warp or block call it, and all get the result. Values are added in one order for one number of
 * threads, so the same input gives the same bits. opjit_add, opjit_maximum and opjit_minimum are here; any struct with
 * such an operator will do. Other algorithms (sort, scan, histogram) are in CUB, whose headers come with CUDA:
 * #include <cub/cub.cuh>.
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

/* NaN if a value is, as in torch. */
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

/* Of the 32 threads of a warp. The value is of any type that __shfl_xor_sync takes. */
template <typename value, typename function>
static __device__ value opjit_warp_reduce(value x, function f)
{
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        x = f(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

/* Of the threads of a block, in any dimensions, whose number is a multiple of 32. */
template <typename value, typename function>
static __device__ value opjit_block_reduce(value x, function f)
{
    __shared__ value of_warp[32];
    const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const unsigned warps = blockDim.x * blockDim.y * blockDim.z / 32;
    x = opjit_warp_reduce(x, f);
    __syncthreads(); /* threads may still read the values of a call before */
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
