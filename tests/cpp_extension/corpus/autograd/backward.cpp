#include <torch/extension.h>

torch::Tensor gradient(torch::Tensor input) {
    pybind11::gil_scoped_release no_gil;
    auto x = input.detach().clone().requires_grad_(true);
    auto y = (x * x * 3).sum();
    y.backward();
    return x.grad();
}
std::vector<torch::Tensor> grads(torch::Tensor input, torch::Tensor weight) {
    pybind11::gil_scoped_release no_gil;
    auto x = input.detach().requires_grad_(), w = weight.detach().clone().set_requires_grad(true);
    auto y = torch::tanh(x.matmul(w));
    return torch::autograd::grad({y}, {x, w}, {torch::ones_like(y)});
}
torch::Tensor second(torch::Tensor input) {
    pybind11::gil_scoped_release no_gil;
    auto x = input.detach().clone().requires_grad_();
    auto g = torch::autograd::grad({x.pow(3).sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return torch::autograd::grad({g.sum()}, {x})[0];
}
torch::Tensor accumulate(torch::Tensor x) {
    pybind11::gil_scoped_release no_gil;
    (x * 2).sum().backward();
    (x * 3).sum().backward({}, true);
    return x.grad();
}
torch::Tensor with_gil(torch::Tensor input) {
    auto x = input.detach().clone().requires_grad_();
    x.square().sum().backward();
    return x.grad();
}
bool has_grad(torch::Tensor x) { return x.grad().defined(); }
torch::Tensor unused(torch::Tensor a) {
    pybind11::gil_scoped_release no_gil;
    auto x = a.detach().requires_grad_(), z = torch::ones({1}).requires_grad_();
    return torch::autograd::grad({x.sum()}, {x, z}, {}, c10::nullopt, false, /*allow_unused=*/true)[0];
}
