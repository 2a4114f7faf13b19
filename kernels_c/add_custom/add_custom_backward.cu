/* add_custom_backward on CUDA: two copies of a gradient, which is read once. */
#include "opjit_elementwise.h"

template <typename word>
struct copy_twice {
    enum { inputs = 1, outputs = 2 };
    __device__ void operator()(const word *x, word *y) const { y[0] = y[1] = x[0]; }
};

opjit_status add_custom_backward_cuda(const opjit_tensor *grad, opjit_tensor *grad_self, opjit_tensor *grad_other,
                                      cudaStream_t stream)
{
    const opjit_tensor *tensors[] = {grad_self, grad_other, grad};
    opjit_elements elements;
    OPJIT_CHECK(grad->dtype != OPJIT_OTHER_DTYPE && !opjit_is_float8(grad->dtype),
                "add_custom_backward takes bool, integers, floating and complex dtypes");
    OPJIT_TRY(opjit_empty_like(grad_self, grad, grad->dtype));
    OPJIT_TRY(opjit_empty_like(grad_other, grad, grad->dtype));
    OPJIT_TRY(opjit_elements_of(&elements, 3, tensors));
    if (elements.bytes[0] == 16)
        opjit_split_complex(&elements);
    switch (elements.bytes[0]) {
    case 1: return opjit_map<uint8_t>(&elements, copy_twice<uint8_t>(), stream);
    case 2: return opjit_map<uint16_t>(&elements, copy_twice<uint16_t>(), stream);
    case 4: return opjit_map<uint32_t>(&elements, copy_twice<uint32_t>(), stream);
    default: return opjit_map<uint64_t>(&elements, copy_twice<uint64_t>(), stream);
    }
}
