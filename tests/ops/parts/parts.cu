#include "opjit_cuda.h"

template <typename scalar_t>
static __global__ void parts_kernel(const scalar_t *x, opjit_layout at, scalar_t *whole, scalar_t *fraction, int64_t n)
{
    OPJIT_KERNEL_LOOP(i, n) {
        scalar_t value = x[opjit_offset(at, i)];
        whole[i] = trunc(value);
        fraction[i] = value - trunc(value);
    }
}

template <typename scalar_t>
static __global__ void joined_kernel(const scalar_t *whole, opjit_layout whole_at, const scalar_t *fraction,
                                     opjit_layout fraction_at, scalar_t *out, int64_t n)
{
    OPJIT_KERNEL_LOOP(i, n)
        out[i] = whole[opjit_offset(whole_at, i)] + fraction[opjit_offset(fraction_at, i)];
}

opjit_status parts_cuda(const opjit_tensor *x, opjit_tensor *whole, opjit_tensor *fraction, cudaStream_t stream)
{
    OPJIT_TRY(opjit_empty(whole, x->dim, x->sizes, x->dtype, x));
    OPJIT_TRY(opjit_empty(fraction, x->dim, x->sizes, x->dtype, x));
    if (x->numel == 0)
        return OPJIT_OK;
    OPJIT_DISPATCH_FLOATING(x->dtype, "parts", {
        parts_kernel<<<opjit_blocks(x->numel, 256), 256, 0, stream>>>((const scalar_t *)x->data, opjit_layout_of(x),
                                                                      (scalar_t *)whole->data,
                                                                      (scalar_t *)fraction->data, x->numel);
    })
    return OPJIT_LAUNCHED();
}

opjit_status joined_cuda(const opjit_tensor *whole, const opjit_tensor *fraction, opjit_tensor *out,
                         cudaStream_t stream)
{
    OPJIT_CHECK(whole->dtype == fraction->dtype, "joined takes two tensors of one dtype, not %s and %s",
                opjit_dtype_name(whole->dtype), opjit_dtype_name(fraction->dtype));
    OPJIT_CHECK(whole->numel == fraction->numel, "joined takes as many whole parts as fractions, not %lld and %lld",
                (long long)whole->numel, (long long)fraction->numel);
    OPJIT_TRY(opjit_empty(out, fraction->dim, fraction->sizes, fraction->dtype, fraction));
    if (out->numel == 0)
        return OPJIT_OK;
    OPJIT_DISPATCH_FLOATING(fraction->dtype, "joined", {
        joined_kernel<<<opjit_blocks(out->numel, 256), 256, 0, stream>>>((const scalar_t *)whole->data,
                                                                         opjit_layout_of(whole),
                                                                         (const scalar_t *)fraction->data,
                                                                         opjit_layout_of(fraction),
                                                                         (scalar_t *)out->data, out->numel);
    })
    return OPJIT_LAUNCHED();
}
