#include <torch/extension.h>

std::tuple<torch::Tensor, torch::Tensor> top(torch::Tensor x, int k) { return torch::topk(x, k, -1, true, true); }
std::vector<torch::Tensor> sorted(torch::Tensor x, bool descending) {
    auto result = x.sort(-1, descending);
    return {std::get<0>(result), std::get<1>(result), torch::argsort(x, int64_t(0))};
}
std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> uniq(torch::Tensor x) { return at::_unique2(x, true, true, true); }
torch::Tensor kth(torch::Tensor x, int64_t k) { return std::get<0>(x.kthvalue(k)); }
torch::Tensor med(torch::Tensor x) { return x.median() + torch::nonzero(x > 0).size(0); }
