#include <torch/extension.h>

std::tuple<torch::Tensor, torch::Tensor> max_dim(torch::Tensor x, int64_t dim) { return torch::max(x, dim); }

std::vector<torch::Tensor> both(torch::Tensor x) {
    auto [values, indices] = x.min(0, true);
    auto m = std::get<0>(x.max(1));
    return {values, indices, m, x.max(), x.min(), torch::argmax(x), x.argmin(1), x.argmax(0, true)};
}
torch::Tensor maximum(torch::Tensor a, torch::Tensor b) { return torch::max(a, b) + torch::minimum(a, b) * 2; }
float largest(torch::Tensor x) { return x.max().item<float>(); }
std::pair<float, int64_t> argmax_pair(torch::Tensor x) {
    auto r = x.flatten().max(0);
    return {std::get<0>(r).item<float>(), std::get<1>(r).item<int64_t>()};
}
