/*
 * What the CUDA kernels of matmul share: a call by value, and the epilogue of neighboring elements.
 */
#ifndef MATMUL_JOB_H
#define MATMUL_JOB_H

#include "opjit_mma.h"

#include "matmul.h"

#define DEPTH 64 /* elements of a tile along k: 128 bytes, a row of the swizzle */

typedef struct matmul_job {
    int64_t rows, columns, depth; /* of out; `columns` is F for silu_multiply */
    const void *x, *w, *bias, *residual;
    int64_t x_row, x_depth, w_depth, w_column, bias_step, residual_row, residual_column; /* strides */
    void *out;                                                                           /* contiguous */
    matmul_epilogue epilogue;
    bool is_packed; /* bias and residual are read, and out is written, four elements at a time */
    int64_t up;     /* from a column of w to its partner: F for silu_multiply, otherwise 0 */
} matmul_job;

/* The columns of out in a tile with some columns of w. */
OPJIT_HOST_DEVICE int columns_of_tile(const matmul_job &job, int of_w)
{
    return job.epilogue == MATMUL_SILU_MULTIPLY ? of_w / 2 : of_w;
}

/* Go on to the next stage of a ring. The parity of its barriers changes with each round. */
static __device__ void next_stage(int *stage, unsigned *parity, int stages)
{
    *stage = *stage + 1 == stages ? 0 : *stage + 1;
    *parity ^= *stage == 0;
}

static __device__ float number(opjit_half value)
{
    return opjit_half_to_float(value);
}

static __device__ float number(opjit_bfloat16 value)
{
    return opjit_bfloat16_to_float(value);
}

static __device__ opjit_half rounded(float value, opjit_half)
{
    return opjit_float_to_half(value);
}

static __device__ opjit_bfloat16 rounded(float value, opjit_bfloat16)
{
    return opjit_float_to_bfloat16(value);
}

/* Neighboring elements that are loaded and stored together. */
template <typename element, int count>
struct __align__(2 * count) neighbors {
    element at[count];
};

/* Load elements as numbers. Without `from`, and where none exist, zeros. */
template <typename element, int count>
static __device__ void load_numbers(float (&to)[count], const void *from, int64_t offset, int64_t step,
                                    int64_t existing, bool is_packed)
{
    const element *first = (const element *)from + offset;
    if (from && is_packed && existing > 0) {
        const neighbors<element, count> read = *(const neighbors<element, count> *)first;
#pragma unroll
        for (int i = 0; i < count; i++)
            to[i] = number(read.at[i]);
        return;
    }
#pragma unroll
    for (int i = 0; i < count; i++)
        to[i] = from && i < existing ? number(first[i * step]) : 0.0f;
}

/* Bias of neighboring columns. */
template <typename element, int count>
static __device__ void load_bias(float (&to)[count], const matmul_job &job, int64_t column)
{
    load_numbers<element>(to, job.bias, column * job.bias_step, job.bias_step, job.columns + job.up - column,
                          job.is_packed);
}

template <typename element, int count>
static __device__ void load_residual(float (&to)[count], const matmul_job &job, int64_t row, int64_t column)
{
    load_numbers<element>(to, job.residual, row * job.residual_row + column * job.residual_column, job.residual_column,
                          row < job.rows ? job.columns - column : 0, job.is_packed);
}

/* The activation of sums, with their partners for silu_multiply. */
template <int count>
static __device__ void activate(float *z, const float *up, matmul_epilogue epilogue)
{
    if (epilogue == MATMUL_SILU_MULTIPLY) {
#pragma unroll
        for (int i = 0; i < count; i++)
            z[i] = matmul_silu(z[i]) * up[i];
    } else if (epilogue == MATMUL_RELU) {
#pragma unroll
        for (int i = 0; i < count; i++)
            z[i] = matmul_activate(z[i], MATMUL_RELU);
    } else if (epilogue == MATMUL_GELU) {
#pragma unroll
        for (int i = 0; i < count; i++)
            z[i] = matmul_activate(z[i], MATMUL_GELU);
    }
}

/* Finish and store four neighboring elements of a row, from their sums with bias, and their partners'. */
template <typename element>
static __device__ void finish_four(const matmul_job &job, float (&z)[4], const float (&up)[4], int64_t row,
                                   int64_t column)
{
    float residual[4];
    load_residual<element>(residual, job, row, column);
    activate<4>(z, up, job.epilogue);

    neighbors<element, 4> four;
    for (int i = 0; i < 4; i++)
        four.at[i] = rounded(z[i] + residual[i], element());
    element *out = (element *)job.out + row * job.columns + column;
    if (job.is_packed) {
        *(neighbors<element, 4> *)out = four;
        return;
    }
    for (int i = 0; i < 4; i++)
        if (column + i < job.columns)
            out[i] = four.at[i];
}

/* Two elements in a word. */
template <typename element>
static __device__ uint32_t pair_of(float low, float high)
{
    return rounded(low, element()).bits | (uint32_t)rounded(high, element()).bits << 16;
}

#endif
