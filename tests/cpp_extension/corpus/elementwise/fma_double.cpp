#include <torch/extension.h>

torch::Tensor fma_strided(torch::Tensor a, torch::Tensor b, double c) {
    TORCH_CHECK_TYPE(a.scalar_type() == torch::kDouble, "fma_strided wants Double, not ", toString(a.scalar_type()));
    TORCH_CHECK(a.dim() == 2 && b.dim() == 2, "expected 2-D tensors");
    TORCH_CHECK(a.size(0) == b.size(0) && a.size(1) == b.size(1));
    auto out = torch::empty({a.size(0), a.size(1)}, a.options());
    const double* p = a.data_ptr<double>();
    const double* q = b.data_ptr<double>();
    double* r = out.data_ptr<double>();
    for (int64_t i = 0; i < a.size(0); i++)
        for (int64_t j = 0; j < a.size(1); j++)
            r[i * out.stride(0) + j * out.stride(1)] = p[i * a.stride(0) + j * a.stride(1)] * q[i * b.stride(0) + j * b.stride(1)] + c;
    return out;
}
