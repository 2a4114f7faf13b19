#include <torch/extension.h>

torch::Tensor conv_relu(torch::Tensor x, torch::Tensor w, torch::Tensor b) { return torch::relu(torch::conv2d(x, w, b, /*stride=*/1, /*padding=*/1)); }
torch::Tensor conv_strided(torch::Tensor x, torch::Tensor w, std::vector<int64_t> stride) {
    return at::conv2d(x, w, {}, stride, {1, 2}, {1, 1}, 1);
}
torch::Tensor conv1d(torch::Tensor x, torch::Tensor w) { return torch::conv1d(x, w); }
torch::Tensor conv_t(torch::Tensor x, torch::Tensor w) { return torch::conv_transpose2d(x, w.transpose(0, 1)); }
torch::Tensor conv_opt(torch::Tensor x, torch::Tensor w, c10::optional<torch::Tensor> b) { return at::convolution(x, w, b, {1, 1}, {0, 0}, {1, 1}, false, {0, 0}, 1); }
