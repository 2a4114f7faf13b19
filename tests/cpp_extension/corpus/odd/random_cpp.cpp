#include <torch/extension.h>
#include <random>

torch::Tensor uniform(int64_t n, unsigned seed) {
    std::mt19937 engine(seed);
    auto t = torch::empty({n}, torch::kFloat64);
    auto a = t.accessor<double, 1>();
    for (int64_t i = 0; i < n; ++i) a[i] = engine() / 4294967296.0;
    return t;
}
torch::Tensor shuffled(torch::Tensor x, int seed) {
    torch::manual_seed(seed);
    return x.index_select(0, torch::randperm(x.size(0)));
}
