#include <torch/extension.h>
#include <vector>
std::vector<torch::Tensor> layer_norm(torch::Tensor x, torch::Tensor weight, torch::Tensor bias, double eps);
