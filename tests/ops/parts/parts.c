#include "opjit.h"

opjit_status parts_cpu(const opjit_tensor *x, opjit_tensor *whole, opjit_tensor *fraction)
{
    OPJIT_TRY(opjit_empty(whole, x->dim, x->sizes, x->dtype, x));
    OPJIT_TRY(opjit_empty(fraction, x->dim, x->sizes, x->dtype, x));
    OPJIT_DISPATCH_FLOATING(x->dtype, "parts", {
        for (int64_t i = 0; i < x->numel; i++) {
            scalar_t value = ((const scalar_t *)x->data)[opjit_offset(x, i)];
            double cut = __builtin_trunc(value);
            ((scalar_t *)whole->data)[i] = (scalar_t)cut;
            ((scalar_t *)fraction->data)[i] = (scalar_t)(value - cut);
        }
    })
    return OPJIT_OK;
}

opjit_status joined_cpu(const opjit_tensor *whole, const opjit_tensor *fraction, opjit_tensor *out)
{
    OPJIT_CHECK(whole->dtype == fraction->dtype, "joined takes two tensors of one dtype, not %s and %s",
                opjit_dtype_name(whole->dtype), opjit_dtype_name(fraction->dtype));
    OPJIT_CHECK(whole->numel == fraction->numel, "joined takes as many whole parts as fractions, not %lld and %lld",
                (long long)whole->numel, (long long)fraction->numel);
    OPJIT_TRY(opjit_empty(out, fraction->dim, fraction->sizes, fraction->dtype, fraction));
    OPJIT_DISPATCH_FLOATING(fraction->dtype, "joined", {
        for (int64_t i = 0; i < out->numel; i++)
            ((scalar_t *)out->data)[i] = ((const scalar_t *)whole->data)[opjit_offset(whole, i)] +
                                         ((const scalar_t *)fraction->data)[opjit_offset(fraction, i)];
    })
    return OPJIT_OK;
}
