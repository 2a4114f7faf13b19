/* What all steps need: a check of the arguments, and a store. */
#ifndef STEPS_H
#define STEPS_H

#include "opjit_cuda.h"

/* Check that x is (M, K) and w is (K, N) as the transpose of a contiguous (N, K), and make out (M, N). */
OPJIT_UNUSED static opjit_status start(const opjit_tensor *x, const opjit_tensor *w, opjit_tensor *out, int rows,
                                       int columns, int depth)
{
    OPJIT_CHECK(x->dim == 2 && w->dim == 2 && x->sizes[1] == w->sizes[0], "expected x (M, K) and w (K, N)");
    OPJIT_CHECK(x->dtype == OPJIT_BFLOAT16 && w->dtype == OPJIT_BFLOAT16, "expected bfloat16");
    const int64_t m = x->sizes[0], n = w->sizes[1], k = x->sizes[1], sizes[] = {m, n};
    OPJIT_CHECK(x->contiguous && w->strides[0] == 1 && w->strides[1] == k,
                "expected a contiguous x, and as w the transpose of a contiguous tensor, such as weight.t()");
    OPJIT_CHECK(m > 0 && n > 0 && k > 0 && m % rows == 0 && n % columns == 0 && k % depth == 0,
                "expected multiples of M %d, N %d and K %d, got M %lld, N %lld and K %lld", rows, columns, depth,
                (long long)m, (long long)n, (long long)k);
    return opjit_empty(out, 2, sizes, x->dtype, x);
}

/* Round two neighboring sums, and store them together. */
OPJIT_UNUSED static __device__ void store_pair(opjit_bfloat16 *to, float first, float second)
{
    *(uint32_t *)to = opjit_float_to_bfloat16(first).bits | (uint32_t)opjit_float_to_bfloat16(second).bits << 16;
}

#endif
