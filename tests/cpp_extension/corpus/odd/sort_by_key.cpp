#include <torch/extension.h>
#include <algorithm>
#include <numeric>
#include <set>

std::tuple<torch::Tensor, torch::Tensor> sort_by_key(torch::Tensor keys, torch::Tensor values) {
    TORCH_CHECK(keys.numel() == values.numel(), "keys and values differ in length");
    std::vector<int64_t> order(keys.numel());
    std::iota(order.begin(), order.end(), 0);
    auto k = keys.accessor<float, 1>();
    std::stable_sort(order.begin(), order.end(), [&k](int64_t a, int64_t b) { return k[a] < k[b]; });
    auto index = torch::tensor(order, torch::kInt64);
    return {keys.index_select(0, index), values.index({index})};
}
int64_t distinct(torch::Tensor x) {
    auto c = x.contiguous();
    std::set<int64_t> seen(c.data_ptr<int64_t>(), c.data_ptr<int64_t>() + c.numel());
    return seen.size();
}
