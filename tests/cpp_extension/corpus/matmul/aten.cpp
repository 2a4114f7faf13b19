#include <torch/extension.h>

at::Tensor mm(at::Tensor a, at::Tensor b) { return a.mm(b); }
at::Tensor linear(at::Tensor x, at::Tensor w, c10::optional<at::Tensor> bias) {
    auto y = at::matmul(x, w.t());
    if (bias.has_value()) y = y + *bias;
    return y;
}
at::Tensor bmm(at::Tensor a, at::Tensor b) { return torch::bmm(a, b); }
at::Tensor addmm(at::Tensor bias, at::Tensor a, at::Tensor b) { return torch::addmm(bias, a, b, 0.5, 2); }
at::Tensor einsum(std::string equation, std::vector<at::Tensor> operands) { return at::einsum(equation, operands); }
at::Tensor mv(at::Tensor a, at::Tensor v) { return a.mv(v); }
