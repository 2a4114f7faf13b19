#include <torch/extension.h>

torch::Tensor forward(torch::Tensor x, double alpha) { return x * alpha; }
std::vector<torch::Tensor> backward(torch::Tensor grad, c10::optional<torch::Tensor> x, std::vector<int64_t> dims, std::tuple<int, float> pair) {
    return {grad.sum(dims) * std::get<0>(pair) * std::get<1>(pair)};
}
