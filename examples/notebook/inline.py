"""Declare an op from a string, and replace its code while it is in use."""

import torch

# begin: inline
import opjit

SOURCE = """
opjit_status scale_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
{
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "scale takes a contiguous float32 tensor");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[i] = (float)a * ((const float *)x->data)[i];
    return OPJIT_OK;
}
"""
scale = opjit.inline("scale(Tensor x, float a) -> Tensor", c=SOURCE, like="x")  # torch.ops.inline.scale
y = scale(torch.ones(3), 2.5)
opjit.inline("scale(Tensor x, float a) -> Tensor", c=SOURCE.replace("(float)a *", "(float)a +"), like="x")
z = scale(torch.ones(3), 2.5)  # the same op, the new code
# end: inline

print(y.tolist(), z.tolist())
