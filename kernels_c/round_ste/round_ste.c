/*
 * round_ste on the CPU: 1 if x > 0.5, otherwise 0, in the dtype of x. A comparison with NaN is false, so NaN gives 0.
 *
 * float16 and bfloat16 are compared as the integers of their bits: positive numbers have the same order, and infinity
 * comes last, before the NaNs.
 *
 * Large tensors are rounded at the speed of memory: tests/benchmarks/elementwise.py.
 */
#include "opjit_elementwise.h"

/* A row function; the compiler makes a vectorized copy of the loop for strides of 1. */
#define ROUND(name_, type_, condition_, one_) \
    static void name_(int64_t n, void *const *data, const int64_t *strides, const void *context) \
    { \
        const int64_t to_stride = strides[0], from_stride = strides[1]; \
        const type_ *from = (const type_ *)data[1]; \
        type_ *restrict to = (type_ *)data[0]; \
        (void)context; \
        for (int64_t i = 0; i < n; i++) { \
            const type_ x = from[i * from_stride]; \
            to[i * to_stride] = (condition_) ? one_ : 0; \
        } \
    }

ROUND(round_float16, int16_t, x > 0x3800 && x <= 0x7c00, 0x3c00)
ROUND(round_bfloat16, int16_t, x > 0x3f00 && x <= 0x7f80, 0x3f80)
ROUND(round_float32, float, x > 0.5f, 1)
ROUND(round_float64, double, x > 0.5, 1)

opjit_status round_ste_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_CHECK(opjit_is_floating(x->dtype), "round_ste takes float16, bfloat16, float32 or float64, not %s",
                opjit_dtype_name(x->dtype));
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    opjit_elements elements;
    OPJIT_TRY(opjit_elements_of(&elements, 2, (const opjit_tensor *[]){out, x}));
    return opjit_for_rows(&elements,
                          x->dtype == OPJIT_FLOAT16    ? round_float16
                          : x->dtype == OPJIT_BFLOAT16 ? round_bfloat16
                          : x->dtype == OPJIT_FLOAT32  ? round_float32
                                                       : round_float64,
                          NULL);
}
