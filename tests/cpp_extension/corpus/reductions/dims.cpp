#include <torch/extension.h>

std::vector<at::Tensor> sums(at::Tensor x, std::vector<int64_t> dims, bool keepdim) {
    return {x.sum(), x.sum(dims, keepdim), x.mean(dims, keepdim), at::sum(x, 0), at::sum(x, at::IntArrayRef({0, 1})), x.sum(-1, true), x.sum(at::kDouble)};
}
at::Tensor variance(at::Tensor x, int64_t dim) { return at::var(x, {dim}, /*unbiased=*/false) + x.std({dim}, /*unbiased=*/true) + x.var(); }
at::Tensor product(at::Tensor x) { return at::prod(x) + x.prod(0, false).sum(); }
