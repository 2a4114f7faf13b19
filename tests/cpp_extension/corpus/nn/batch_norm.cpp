#include <torch/extension.h>

std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> batch_norm_train(torch::Tensor x, torch::Tensor weight, torch::Tensor bias) {
    return at::native_batch_norm(x, weight, bias, {}, {}, true, 0.1, 1e-5);
}
void update_running(torch::Tensor running, torch::Tensor batch, double momentum) {
    AT_ASSERTM(momentum >= 0 && momentum <= 1, "momentum out of range: ", momentum);
    running.mul_(1 - momentum).add_(batch, momentum);
}
