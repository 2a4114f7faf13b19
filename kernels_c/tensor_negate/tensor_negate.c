/*
 * tensor_negate on the CPU: -x, like torch.neg.
 *
 * Negation is (x ^ flip) + carry on the bits. For an integer flip is all ones and carry 1 (two's complement); for a
 * floating number flip is the sign bit and carry 0, which also turns the sign of zero, infinity and NaN. So one loop
 * for each element size serves all dtypes.
 *
 * Large tensors are negated at the speed of memory: tests/benchmarks/elementwise.py.
 */
#include "opjit_elementwise.h"

typedef struct negation {
    uint64_t flip, carry;
} negation;

/* A row function; the compiler makes a vectorized copy of the loop for strides of 1. */
#define NEGATE(type_) \
    static void negate_##type_(int64_t n, void *const *data, const int64_t *strides, const void *context) \
    { \
        const negation *bits = (const negation *)context; \
        const type_ flip = (type_)bits->flip, carry = (type_)bits->carry; \
        const int64_t to_stride = strides[0], from_stride = strides[1]; \
        const type_ *from = (const type_ *)data[1]; \
        type_ *restrict to = (type_ *)data[0]; \
        for (int64_t i = 0; i < n; i++) \
            to[i * to_stride] = (type_)((from[i * from_stride] ^ flip) + carry); \
    }

NEGATE(uint8_t)
NEGATE(uint16_t)
NEGATE(uint32_t)
NEGATE(uint64_t)

opjit_status tensor_negate_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype != OPJIT_BOOL && x->dtype != OPJIT_OTHER_DTYPE && !opjit_is_float8(x->dtype),
                "tensor_negate takes integers, floating and complex dtypes, not %s%s", opjit_dtype_name(x->dtype),
                x->dtype == OPJIT_BOOL ? "; ~x inverts a bool tensor" : "");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    opjit_elements elements;
    OPJIT_TRY(opjit_elements_of(&elements, 2, (const opjit_tensor *[]){out, x}));
    if (x->dtype >= OPJIT_COMPLEX64)
        opjit_split_complex(&elements);
    const int64_t bytes = elements.bytes[0];
    const bool integral = opjit_is_integral(x->dtype);
    const negation bits = {integral ? UINT64_MAX : UINT64_C(1) << (8 * bytes - 1), integral};
    return opjit_for_rows(&elements,
                          bytes == 1   ? negate_uint8_t
                          : bytes == 2 ? negate_uint16_t
                          : bytes == 4 ? negate_uint32_t
                                       : negate_uint64_t,
                          &bits);
}
