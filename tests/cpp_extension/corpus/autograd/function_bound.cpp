#include <torch/extension.h>

struct Clip : torch::autograd::Function<Clip> {
    static torch::autograd::tensor_list forward(torch::autograd::AutogradContext* ctx, const torch::Tensor& x, double limit) {
        auto mask = x.abs() <= limit;
        ctx->save_for_backward({mask});
        ctx->mark_non_differentiable({mask});
        return {x.clamp(-limit, limit), mask};
    }
    static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::tensor_list grads) {
        return {grads[0] * ctx->get_saved_variables()[0], torch::Tensor()};
    }
};
struct Double_ : torch::autograd::Function<Double_> {
    static torch::Tensor forward(torch::autograd::AutogradContext* ctx, torch::Tensor x) {
        x.mul_(2);
        ctx->mark_dirty({x});
        return x;
    }
    static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*, torch::autograd::tensor_list g) { return {g[0] * 2}; }
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("clip", [](const torch::Tensor& x, double limit) { return Clip::apply(x, limit); });
    m.def("double_", [](torch::Tensor x) { return Double_::apply(x); });
    m.def("double_copy", [](torch::Tensor x) { return Double_::apply(x.clone()); });
}
