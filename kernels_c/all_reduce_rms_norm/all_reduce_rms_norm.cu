/*
 * all_reduce_rms_norm on CUDA: the sum of x over the ranks, plus the residual, normed; one launch, a block for a row.
 *
 * A row goes to the other ranks in words, like small tensors in all_reduce_ranks. A thread keeps its sums in the
 * residual, and reads them again when the sum of the row's squares is complete.
 */
#include "opjit_collective.h"
#include "opjit_reduce.h"

#define THREADS OPJIT_WORDS_OF_BLOCK /* one for each word of a part of a row */

template <typename element>
struct job {
    const element *x, *weight;
    element *residual, *out;
    int64_t rows, columns;
    float eps;
    bool aligned;
};

/* A thread's share of a part of a row. */
template <typename element>
struct part {
    typedef opjit_some<element, sizeof(opjit_word)> some;
    some x, residual, weight;

    __device__ void load(const job<element> &j, int64_t row, int64_t first)
    {
        x = opjit_load_some<element, sizeof(opjit_word)>(j.x + row * j.columns, first, j.columns, j.aligned);
        residual =
            opjit_load_some<element, sizeof(opjit_word)>(j.residual + row * j.columns, first, j.columns, j.aligned);
        weight = opjit_load_some<element, sizeof(opjit_word)>(j.weight, first, j.columns, j.aligned);
    }

    /* Add the ranks' x to the residual; returns the sum of its squares. */
    __device__ float add(const opjit_peers *p, const opjit_word (&words)[OPJIT_RANKS])
    {
        opjit_sums<element, sizeof(opjit_word)> sums;
        float squares = 0;
#pragma unroll
        for (int r = 0; r < OPJIT_RANKS; r++) {
            some of_rank = x;
            if (r >= p->world)
                break;
            if (r != p->rank)
                memcpy(&of_rank, &words[r], sizeof of_rank);
            sums.add(of_rank, r == 0);
        }
        sums.add(residual, false);
        residual = sums.rounded();
#pragma unroll
        for (int e = 0; e < some::width; e++)
            squares += opjit_number(residual.at[e]) * opjit_number(residual.at[e]);
        return squares;
    }

    __device__ void store(const job<element> &j, int64_t row, int64_t first, float scale)
    {
#pragma unroll
        for (int e = 0; e < some::width; e++)
            opjit_put(&x.at[e], opjit_number(residual.at[e]) * scale * opjit_number(weight.at[e]));
        opjit_store_some(j.out + row * j.columns, first, j.columns, j.aligned, x);
    }
};

template <typename element>
static __global__ void __launch_bounds__(THREADS) norm_rows(const opjit_peers p, const job<element> j)
{
    enum { width = part<element>::some::width };
    for (int64_t row = blockIdx.x; row < j.rows; row += gridDim.x) {
        part<element> own;
        float squares = 0;
        for (int64_t first = threadIdx.x * width; first - (int)threadIdx.x * width < j.columns;
             first += THREADS * width) {
            opjit_word words[OPJIT_RANKS];
            bool came = true;
            const uint32_t count = opjit_begin_words(&p);
            own.load(j, row, first);
            memcpy(&words[0], &own.x, sizeof words[0]);
            if (first < j.columns) {
                opjit_push_all(&p, count, threadIdx.x, words[0]);
                came = opjit_pull_all(&p, count, threadIdx.x, words);
                squares += own.add(&p, words);
                opjit_store_some(j.residual + row * j.columns, first, j.columns, j.aligned, own.residual);
            }
            if (!opjit_end_words(&p, count, came))
                return;
        }
        const float scale = rsqrtf(opjit_block_reduce(squares, opjit_add()) / (float)j.columns + j.eps);
        for (int64_t first = threadIdx.x * width; first < j.columns; first += THREADS * width) {
            if (j.columns > THREADS * width) /* else the thread still has its part */
                own.load(j, row, first);
            own.store(j, row, first, scale);
        }
    }
}

template <typename element>
static opjit_status norm_as(opjit_peers *p, const opjit_tensor *x, const opjit_tensor *weight, opjit_tensor *residual,
                            float eps, opjit_tensor *out, cudaStream_t stream)
{
    const int64_t columns = x->sizes[x->dim - 1], rows = x->numel / columns;
    const bool aligned = columns * sizeof(element) % 4 == 0 && opjit_is_aligned(x->data, 4) &&
                         opjit_is_aligned(weight->data, 4) && opjit_is_aligned(residual->data, 4);
    const job<element> j = {(const element *)x->data,
                            (const element *)weight->data,
                            (element *)residual->data,
                            (element *)out->data,
                            rows,
                            columns,
                            eps,
                            aligned};
    int most;
    OPJIT_TRY(opjit_most_blocks((const void *)norm_rows<element>, THREADS, 0, &most));
    const int blocks = (int)opjit_least(rows, opjit_least(most, OPJIT_BLOCKS));
    OPJIT_TRY(opjit_peers_launch(p, (const void *)norm_rows<element>, blocks, THREADS, 0, stream));
    norm_rows<<<blocks, THREADS, 0, stream>>>(*p, j);
    return OPJIT_LAUNCHED();
}

opjit_status all_reduce_rms_norm_cuda(const opjit_tensor *x, opjit_tensor *residual, const opjit_tensor *weight,
                                      const char *group, double eps, opjit_tensor *out, cudaStream_t stream)
{
    opjit_peers p;
    opjit_tensor packed, weights;
    OPJIT_CHECK(
        x->dim > 0 && opjit_same_sizes(x, residual) && weight->numel == x->sizes[x->dim - 1] &&
            residual->dtype == x->dtype && weight->dtype == x->dtype && residual->contiguous,
        "takes x and a contiguous residual of the same sizes, and a weight for the last dimension, of one dtype");
    OPJIT_TRY(opjit_peers_of(&p, group, 0));
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    OPJIT_TRY(opjit_contiguous(&packed, x));
    OPJIT_TRY(opjit_contiguous(&weights, weight));
    opjit_agree(&p, x->numel << 8 | x->dtype);
    if (x->numel == 0)
        return OPJIT_OK;
    switch (x->dtype) {
    case OPJIT_FLOAT16: return norm_as<opjit_half>(&p, &packed, &weights, residual, (float)eps, out, stream);
    case OPJIT_BFLOAT16: return norm_as<opjit_bfloat16>(&p, &packed, &weights, residual, (float)eps, out, stream);
    case OPJIT_FLOAT32: return norm_as<float>(&p, &packed, &weights, residual, (float)eps, out, stream);
    default: OPJIT_FAIL("takes float16, bfloat16 or float32, not %s", opjit_dtype_name(x->dtype));
    }
}
