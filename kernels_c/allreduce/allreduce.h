/* What allreduce has in common on the CPU and on CUDA. */
#ifndef ALLREDUCE_H
#define ALLREDUCE_H

#include "opjit.h"

/*
 * A view of x that holds each element of an expanded tensor once: dimensions of stride 0 get size 1. `sizes` is memory
 * for the view. Returns how often x repeats each element, so how often its sum counts.
 */
static int64_t without_repeats(const opjit_tensor *x, int64_t sizes[OPJIT_MAX_DIM], opjit_tensor *view)
{
    int64_t repeats = 1;
    *view = *x;
    if (x->contiguous)
        return repeats;
    for (int64_t d = 0; d < x->dim; d++) {
        const bool repeated = x->strides[d] == 0;
        repeats *= repeated ? x->sizes[d] : 1;
        sizes[d] = repeated ? 1 : x->sizes[d];
    }
    view->sizes = sizes;
    view->numel = x->numel / repeats;
    return repeats;
}

/* torch.sum's rule: integers and bool give int64, floating dtypes stay the same, and `dtype` overrides both. */
static opjit_status result_dtype(const opjit_tensor *x, const opjit_dtype *dtype, opjit_dtype *result)
{
    *result = dtype ? *dtype : opjit_is_integral(x->dtype) ? OPJIT_INT64 : x->dtype;
    OPJIT_CHECK(x->dtype <= OPJIT_FLOAT64 && *result <= OPJIT_FLOAT64 && !opjit_is_float8(x->dtype) &&
                    !opjit_is_float8(*result),
                "allreduce takes and gives bool, integers and real floating dtypes, not %s to %s",
                opjit_dtype_name(x->dtype), opjit_dtype_name(*result));
    return OPJIT_OK;
}

/*
 * torch.sum converts each element to the result's dtype, then adds. Converting the sum instead is faster, and is right
 * unless elements lose their fraction or become true, 64-bit integers wrap around, or a float64 sum is made of narrower
 * floats. A floating result is rounded once, where torch rounds every element: it is nearer, and large elements may
 * still cancel.
 */
static bool converts_the_sum(opjit_dtype from, opjit_dtype to, int64_t numel)
{
    if (from == to)
        return true;
    if (opjit_is_integral(to))
        return opjit_is_integral(from) && to != OPJIT_BOOL;
    if (opjit_is_integral(from))
        return opjit_dtype_size(from) <= 4 && numel <= INT32_MAX;
    return to != OPJIT_FLOAT64;
}

#endif
