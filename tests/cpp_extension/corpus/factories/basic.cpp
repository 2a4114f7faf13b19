#include <torch/extension.h>

std::vector<torch::Tensor> all(int64_t n) {
    return {
        torch::zeros({n, 2}), torch::ones(n), torch::full({2, n}, 3.5), torch::full({n}, 3, torch::kLong), torch::eye(n), torch::eye(2, n),
        torch::arange(n), torch::arange(1, n), torch::arange(0.0, 1.0, 0.25), torch::linspace(0, 1, n), torch::logspace(0, 2, 3),
        torch::zeros({}), torch::ones({n, n}, torch::kBool), torch::zeros({0, n}), torch::tril(torch::ones({n, n})), torch::randperm(0),
    };
}
torch::Tensor allocated(int64_t n) {
    auto t = torch::empty({n, 3}, torch::kFloat64);
    t.fill_(1.25);
    return t;
}
torch::Tensor strided(int64_t n) { return torch::empty_strided({n, 2}, {1, n}).zero_(); }
