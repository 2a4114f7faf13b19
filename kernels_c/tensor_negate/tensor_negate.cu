/* tensor_negate on CUDA: -x, as torch.neg. The same arithmetic as in tensor_negate.c. */
#include "opjit_elementwise.h"

template <typename word>
struct negate {
    enum { inputs = 1, outputs = 1 };
    word flip, carry;
    __device__ void operator()(const word *x, word *y) const { y[0] = (word)((x[0] ^ flip) + carry); }
};

/* Integers of one byte, four at a time: one at a time takes 8 % longer than memory does. With the top bits set aside, no byte
   borrows from its neighbour: 0x80 - low is in 1..0x80, and turning the top bit over subtracts what was set aside. */
struct negate_bytes {
    enum { inputs = 1, outputs = 1 };
    __device__ void operator()(const uint32_t *x, uint32_t *y) const
    {
        const uint32_t top = 0x80808080u;
        y[0] = (top - (x[0] & ~top)) ^ (~x[0] & top);
    }
};

static opjit_status negate_all_bytes(opjit_elements elements, cudaStream_t stream)
{
    elements.numel /= 4;
    elements.bytes[0] = elements.bytes[1] = 4;
    return opjit_map_dense<uint32_t>(&elements, negate_bytes(), stream);
}

template <typename word>
static opjit_status negate_all(const opjit_elements *elements, bool integral, cudaStream_t stream)
{
    const word sign = (word)((word)1 << (8 * sizeof(word) - 1));
    const negate<word> f = {integral ? (word)-1 : sign, (word)integral};
    return opjit_map<word>(elements, f, stream);
}

opjit_status tensor_negate_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)
{
    OPJIT_CHECK(x->dtype != OPJIT_BOOL && x->dtype != OPJIT_OTHER_DTYPE,
                "tensor_negate takes integers, floating and complex dtypes, not %s%s",
                opjit_dtype_name(x->dtype), x->dtype == OPJIT_BOOL ? "; ~x inverts a bool tensor" : "");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    const opjit_tensor *tensors[] = {out, x};
    opjit_elements elements;
    OPJIT_TRY(opjit_elements_of(&elements, 2, tensors));
    if (x->dtype >= OPJIT_COMPLEX64)
        opjit_split_complex(&elements);
    const bool integral = opjit_is_integral(x->dtype);
    if (elements.bytes[0] == 1 && elements.numel % 4 == 0 && opjit_packs(&elements) > 0)
        return negate_all_bytes(elements, stream); /* the only types of one byte that come here are integers */
    switch (elements.bytes[0]) {
    case 1: return negate_all<uint8_t>(&elements, integral, stream);
    case 2: return negate_all<uint16_t>(&elements, integral, stream);
    case 4: return negate_all<uint32_t>(&elements, integral, stream);
    default: return negate_all<uint64_t>(&elements, integral, stream);
    }
}
