#include <torch/extension.h>

torch::Tensor no_grad(torch::Tensor x) {
    torch::NoGradGuard guard;
    return x * 2;
}
std::vector<torch::Tensor> mode(torch::Tensor x, bool enabled) {
    torch::Tensor inside;
    {
        at::AutoGradMode guard(enabled);
        inside = x * 2;
    }
    return {inside, x * 3};
}
bool enabled() { return at::GradMode::is_enabled() && torch::autograd::GradMode::is_enabled(); }
torch::Tensor inference(torch::Tensor x) {
    c10::InferenceMode guard;
    return x + 1;
}
torch::Tensor below(torch::Tensor x) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return x * 2;
}
void set_grad(torch::Tensor x) { x.set_requires_grad(true); }
