#include <torch/extension.h>

std::vector<at::Tensor> pieces(at::Tensor x) {
    std::vector<at::Tensor> out = at::chunk(x, 3, 1);
    for (auto& t : x.split(2)) out.push_back(t);
    for (auto& t : at::split_with_sizes(x, {1, x.size(1) - 1}, 1)) out.push_back(t);
    auto rows = x.unbind();
    out.insert(out.end(), rows.begin(), rows.end());
    return out;
}
at::Tensor join(at::TensorList parts, int64_t dim) { return at::cat(parts, dim); }
at::Tensor pile(std::vector<at::Tensor> parts, int64_t dim) { return torch::stack(parts, dim); }
at::Tensor both(at::Tensor a, at::Tensor b) { return torch::cat({a, b}) + torch::vstack({b, a}) + at::concat({a, a}, 0); }
std::vector<at::Tensor> grid(at::Tensor a, at::Tensor b) { return torch::meshgrid({a, b}, "ij"); }
