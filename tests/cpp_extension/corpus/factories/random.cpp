#include <torch/extension.h>

std::vector<torch::Tensor> seeded(int64_t seed) {
    torch::manual_seed(seed);
    auto a = torch::rand({2, 3}), b = torch::randn({4}), c = torch::randint(0, 10, {5}), d = torch::randperm(6), e = torch::randint(7, {2}, torch::kInt32);
    auto f = torch::empty({3}).uniform_(-1, 1), g = torch::zeros({4}).normal_(2.0, 0.5), h = torch::bernoulli(torch::full({6}, 0.5));
    return {a, b, c, d, e, f, g, h, torch::rand_like(a), torch::randn_like(b, torch::kDouble)};
}
torch::Tensor noise(torch::Tensor x) { return x + torch::randn_like(x) * 0.1; }
torch::Tensor with_generator(int64_t seed) {
    auto gen = at::detail::createCPUGenerator(seed);
    return at::rand({3}, gen);
}
