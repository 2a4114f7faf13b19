#include <torch/extension.h>

std::vector<torch::Tensor> like(torch::Tensor x) {
    return {torch::zeros_like(x), torch::ones_like(x), torch::full_like(x, 7), torch::zeros_like(x, x.options().dtype(torch::kFloat16)),
            torch::empty_like(x).zero_(), x.new_zeros({3}), x.new_ones({2, 2}), x.new_full({1, 2}, 4), x.new_empty({0}), x.new_zeros({2}, torch::kInt64)};
}
torch::Tensor like_double(torch::Tensor x) { return torch::ones_like(x, torch::kDouble); }
torch::Tensor keep_format(torch::Tensor x) { return torch::zeros_like(x, x.options(), torch::MemoryFormat::Preserve); }
