"""The README's first screen: an op from a string. Its first call compiles the string."""

# begin: inline
import torch

import opjit

SQUARE = """
opjit_status square_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "expected contiguous float32");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    const float *from = x->data;
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[i] = from[i] * from[i];
    return OPJIT_OK;
}"""
square = opjit.inline("square(Tensor x) -> Tensor", c=SQUARE, like="x")
print(square(torch.arange(4.0)))  # tensor([0., 1., 4., 9.])
# end: inline
