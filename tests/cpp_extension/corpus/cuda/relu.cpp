#include <torch/extension.h>

torch::Tensor relu_cuda(torch::Tensor x);
void relu_cuda_(torch::Tensor x);
