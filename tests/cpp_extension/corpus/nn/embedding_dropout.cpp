#include <torch/extension.h>

torch::Tensor embed(torch::Tensor table, torch::Tensor idx) { return torch::embedding(table, idx); }
torch::Tensor drop(torch::Tensor x, double p, bool train) { return torch::dropout(x, p, train); }
torch::Tensor lookup(torch::Tensor table, torch::Tensor idx) { return table.index_select(0, idx).index({idx.lt(3)}); }
torch::Tensor positions(int64_t n, int64_t d) {
    auto pos = torch::arange(n, torch::kFloat).unsqueeze(1);
    auto freq = torch::exp(torch::arange(0, d, 2, torch::kFloat) * (-std::log(10000.0) / d));
    return torch::cat({torch::sin(pos * freq), torch::cos(pos * freq)}, 1);
}
