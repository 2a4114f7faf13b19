#include <torch/extension.h>
#include <numeric>

torch::Tensor dot(torch::Tensor a, torch::Tensor b) {
    TORCH_CHECK(a.dim() == 1 && b.dim() == 1, "dot expects vectors");
    TORCH_CHECK(a.numel() == b.numel(), "dot expects vectors of one length, got ", a.numel(), " and ", b.numel());
    float acc = std::inner_product(a.data_ptr<float>(), a.data_ptr<float>() + a.numel(), b.data_ptr<float>(), 0.0f);
    return torch::tensor(acc);
}
at::Scalar dot_scalar(torch::Tensor a, torch::Tensor b) { return torch::dot(a, b).item(); }
torch::Tensor outer(torch::Tensor a, torch::Tensor b) { return torch::outer(a, b); }
