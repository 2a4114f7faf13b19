/*
 * round_ste on the CPU: 1 where x > 0.5, else 0, in x's dtype. A comparison with NaN is false, so NaN gives 0.
 *
 * float16 and bfloat16 are compared as the integers of their bits: among the positive ones these have the same order,
 * and infinity comes last, before the NaNs.
 */
#include "opjit_elementwise.h"

/* Written with vectors, so there is nothing for the compiler's later passes, and they take longer than all others. */
#ifndef __clang__
#pragma GCC optimize "Og"
#endif

typedef OPJIT_VECTOR(int16_t, OPJIT_VECTOR_BYTES) int16s;
typedef OPJIT_VECTOR(int32_t, OPJIT_VECTOR_BYTES) int32s;
typedef OPJIT_VECTOR(int64_t, OPJIT_VECTOR_BYTES) int64s;
typedef OPJIT_VECTOR(float, OPJIT_VECTOR_BYTES) floats;
typedef OPJIT_VECTOR(double, OPJIT_VECTOR_BYTES) doubles;

/*
 * A row: element i of a tensor lies i strides after the first; dense tensors have a stride of 1. A vector's comparison
 * gives all ones where it holds: `mask_` of a vector x, and the bits of 1 where they are set.
 */
#define ROUND(name_, type_, vector_, masks_, mask_, condition_, one_) \
    static void name_(int64_t n, void *const *data, const int64_t *strides, const void *context) \
    { \
        type_ *to = (type_ *)data[0]; \
        const type_ *from = (const type_ *)data[1]; \
        const int64_t to_stride = strides[0], from_stride = strides[1]; \
        (void)context; \
        if (to_stride == 1 && from_stride == 1) { \
            OPJIT_MAP_VECTORS(vector_, n, to, from, from, (vector_)((masks_)(mask_) & (masks_)((vector_){0} + one_))); \
        } else { \
            for (int64_t i = 0; i < n; i++) { \
                const type_ x = from[i * from_stride]; \
                to[i * to_stride] = (condition_) ? one_ : 0; \
            } \
        } \
    }
#define ROUND_BITS(name_, half_, one_, infinity_) \
    ROUND(name_, int16_t, int16s, int16s, (x > half_) & (x <= infinity_), x > half_ && x <= infinity_, one_)

ROUND_BITS(round_float16, 0x3800, 0x3c00, 0x7c00)
ROUND_BITS(round_bfloat16, 0x3f00, 0x3f80, 0x7f80)
ROUND(round_float32, float, floats, int32s, x > 0.5f, x > 0.5f, 1)
ROUND(round_float64, double, doubles, int64s, x > 0.5, x > 0.5, 1)

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
