#include "opjit_cuda.h"

/* A block of 256 threads adds a row of at most 256 elements. */
static __global__ void sum_rows(const float *x, float *out, int columns)
{
    __shared__ float part[256];
    const int thread = threadIdx.x;
    part[thread] = thread < columns ? x[blockIdx.x * columns + thread] : 0;
    __syncthreads();
    for (int step = 128; step > 0; step /= 2) {
        if (thread < step)
            part[thread] += part[thread + step];
        __syncthreads();
    }
    if (thread == 0)
        out[blockIdx.x] = part[0];
}

opjit_status row_sum_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_CHECK(x->dim == 2 && x->sizes[1] <= 256, "row_sum takes matrices of at most 256 columns");
    OPJIT_CHECK(x->contiguous && x->dtype == OPJIT_FLOAT32, "row_sum takes contiguous float32");
    OPJIT_TRY(opjit_empty(out, 1, x->sizes, x->dtype, x));
    if (x->sizes[0] > 0)
        sum_rows<<<(unsigned)x->sizes[0], 256, 0, stream>>>((const float *)x->data, (float *)out->data,
                                                            (int)x->sizes[1]);
    return OPJIT_LAUNCHED();
}
