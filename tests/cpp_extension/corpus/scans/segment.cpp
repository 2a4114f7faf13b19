#include <torch/extension.h>

torch::Tensor segment_sum(torch::Tensor values, torch::Tensor ids, int64_t n) {
    auto out = torch::zeros({n, values.size(1)}, values.options());
    return out.index_add_(0, ids, values);
}
torch::Tensor scatter_max(torch::Tensor x, torch::Tensor ids, int64_t n) {
    std::vector<int64_t> shape = {n, x.size(1)};
    auto out = torch::full(shape, -100, x.options());
    auto index = ids.view({-1, 1}).expand({-1, x.size(1)});
    return out.scatter_reduce(0, index, x, "amax");
}
torch::Tensor scatter_add(torch::Tensor x, torch::Tensor ids, int64_t n) {
    return torch::zeros({n, x.size(1)}, x.dtype()).scatter_add_(0, ids.unsqueeze(1).expand_as(x), x);
}
torch::Tensor one_hot(torch::Tensor ids, int64_t n) { return torch::zeros({ids.size(0), n}).scatter_(1, ids.unsqueeze(1), 1); }
