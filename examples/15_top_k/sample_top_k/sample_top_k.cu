/*
 * The method of sample_top_k.c, with one block for each row, which reads the row five times. A single row uses only one
 * multiprocessor.
 */
#include "opjit_cuda.h"
#include "sample_top_k.h"

enum { THREADS = 256 }; /* one for each value of eight bits */

static __device__ uint32_t kth_largest(const float *row, uint32_t n, uint32_t k)
{
    __shared__ uint32_t count[THREADS], found, left;
    if (threadIdx.x == 0) {
        found = 0;
        left = k;
    }
    for (int shift = 24; shift >= 0; shift -= 8) {
        uint32_t above = 0;
        count[threadIdx.x] = 0;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
            const uint32_t rest = (rank_of(row[i]) ^ found) >> shift;
            if (rest < 256)
                atomicAdd(&count[rest], 1u);
        }
        __syncthreads();
        for (uint32_t digit = threadIdx.x + 1; digit < 256; digit++)
            above += count[digit];
        const bool mine = above < left && left <= above + count[threadIdx.x];
        __syncthreads();
        if (mine) {
            found |= threadIdx.x << shift;
            left -= above;
        }
        __syncthreads();
    }
    return found;
}

static __global__ void sample_kernel(const float *logits, uint32_t n, uint32_t k, float temperature,
                                     const uint64_t *seed, int64_t *out)
{
    __shared__ unsigned long long largest;
    const int64_t start = (int64_t)blockIdx.x * n;
    const uint32_t least = kth_largest(logits + start, n, k);
    unsigned long long own = 0;
    if (threadIdx.x == 0)
        largest = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
        if (rank_of(logits[start + i]) < least)
            continue;
        const unsigned long long next = contender(logits[start + i], temperature, *seed, start, i);
        own = next > own ? next : own;
    }
    atomicMax(&largest, own);
    __syncthreads();
    if (threadIdx.x == 0)
        out[blockIdx.x] = winner(largest);
}

opjit_status sample_top_k_cuda(const opjit_tensor *logits, int64_t k, double temperature, const uint64_t *seed,
                               opjit_tensor *out, cudaStream_t stream)
{
    opjit_tensor packed;
    OPJIT_TRY(check_sample_top_k(logits, k, temperature));
    OPJIT_TRY(opjit_contiguous(&packed, logits));
    OPJIT_TRY(opjit_empty(out, logits->dim - 1, logits->sizes, OPJIT_INT64, logits));
    if (out->numel == 0)
        return OPJIT_OK;
    sample_kernel<<<(unsigned)out->numel, THREADS, 0, stream>>>((const float *)packed.data,
                                                                (uint32_t)logits->sizes[logits->dim - 1], (uint32_t)k,
                                                                (float)temperature, seed, (int64_t *)out->data);
    return OPJIT_LAUNCHED();
}
