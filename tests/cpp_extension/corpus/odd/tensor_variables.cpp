#include <torch/extension.h>

torch::Tensor reassigned(torch::Tensor x) {
    torch::Tensor y;
    if (!y.defined()) y = x;
    y = y + 1;
    std::swap(x, y);
    at::Tensor z = std::move(x);
    auto w = z;
    w.add_(1);
    return z;
}
bool undefined_after_move(torch::Tensor x) {
    auto y = std::move(x);
    return !x.defined() && y.defined();
}
torch::Tensor reset(torch::Tensor x) { x.reset(); return x; }
torch::Tensor array_of(torch::Tensor x) {
    std::array<torch::Tensor, 2> pair{x, x * 2};
    torch::Tensor list[2] = {pair[0], pair[1]};
    return list[0] + list[1];
}
torch::Tensor map_of(std::map<std::string, torch::Tensor> d) {
    torch::Tensor total = torch::zeros({});
    for (auto& [key, value] : d) total = total + value.sum() * int64_t(key.size());
    return total;
}
