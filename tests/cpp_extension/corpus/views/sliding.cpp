#include <torch/extension.h>

torch::Tensor windows(torch::Tensor x, int64_t size, int64_t step) { return x.unfold(0, size, step); }
torch::Tensor strided(torch::Tensor x) { return torch::as_strided(x, {2, 2}, {1, 2}, 1); }
torch::Tensor roll(torch::Tensor x) { return torch::roll(x, {1, 2}, {0, 1}) + x.rot90(2, {0, 1}); }
torch::Tensor detach(torch::Tensor x) { return x.detach(); }
torch::Tensor set(torch::Tensor x) {
    auto y = torch::empty({0}, x.options());
    y.resize_({2, 2}).copy_(x.slice(0, 0, 2).slice(1, 0, 2));
    return y;
}
