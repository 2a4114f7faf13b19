/*
 * tensor_negate on CUDA: -x, like torch.neg, with the arithmetic of tensor_negate.c.
 *
 * Packed tensors are negated at the bandwidth of the memory: tests/benchmarks/elementwise.py.
 */
#include "opjit_elementwise.h"

template <typename word>
struct negate {
    enum { inputs = 1, outputs = 1 };
    word flip, carry;
    __device__ void operator()(const word *x, word *y) const { y[0] = (word)((x[0] ^ flip) + carry); }
};

template <typename word>
static opjit_status negate_all(const opjit_elements *elements, bool integral, cudaStream_t stream)
{
    const word sign = (word)((word)1 << (8 * sizeof(word) - 1));
    const negate<word> f = {integral ? (word)-1 : sign, (word)integral};
    return opjit_map<word>(elements, f, stream);
}

opjit_status tensor_negate_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_CHECK(x->dtype != OPJIT_BOOL && x->dtype != OPJIT_OTHER_DTYPE && !opjit_is_float8(x->dtype),
                "tensor_negate takes integers, floating and complex dtypes, not %s%s", opjit_dtype_name(x->dtype),
                x->dtype == OPJIT_BOOL ? "; ~x inverts a bool tensor" : "");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    const opjit_tensor *tensors[] = {out, x};
    opjit_elements elements;
    OPJIT_TRY(opjit_elements_of(&elements, 2, tensors));
    if (x->dtype >= OPJIT_COMPLEX64)
        opjit_split_complex(&elements);
    const bool integral = opjit_is_integral(x->dtype);
    switch (elements.bytes[0]) {
    case 1: return negate_all<uint8_t>(&elements, integral, stream);
    case 2: return negate_all<uint16_t>(&elements, integral, stream);
    case 4: return negate_all<uint32_t>(&elements, integral, stream);
    default: return negate_all<uint64_t>(&elements, integral, stream);
    }
}
