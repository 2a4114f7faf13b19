#include <torch/extension.h>

torch::Tensor linear_forward(torch::Tensor input, torch::Tensor weights) { return torch::matmul(input, weights.t()); }
std::tuple<torch::Tensor, torch::Tensor> linear_backward(torch::Tensor grad_output, torch::Tensor input, torch::Tensor weights) {
    TORCH_CHECK(grad_output.size(1) == weights.size(0), "grad_output has ", grad_output.size(1), " columns, weights ", weights.size(0), " rows");
    return std::make_tuple(grad_output.matmul(weights), grad_output.t().matmul(input));
}
