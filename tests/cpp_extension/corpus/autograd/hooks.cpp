#include <torch/extension.h>

torch::Tensor doubled_gradient(torch::Tensor x) {
    auto y = x * 1;
    if (y.requires_grad()) y.register_hook([](torch::Tensor grad) { return grad * 2; });
    return y;
}
torch::Tensor retained(torch::Tensor input) {
    auto x = input.detach().clone().requires_grad_();
    auto y = x * 2;
    y.retain_grad();
    y.square().sum().backward();
    return y.grad() + x.grad();
}
int64_t version(torch::Tensor x) { auto before = x._version(); x.add_(1); return x._version() - before; }
std::string node(torch::Tensor x) { auto y = x * 2; return y.grad_fn() ? y.grad_fn()->name() : "none"; }
torch::Tensor variable_data(torch::Tensor x) { return x.variable_data() + x.data(); }
