#include <torch/extension.h>

torch::Tensor cumsum(torch::Tensor x, int64_t dim) { return x.cumsum(dim); }
torch::Tensor cumsum_naive(torch::Tensor x) {
    TORCH_CHECK(x.dim() == 1, "only 1-D input is supported, got shape ", x.sizes());
    auto out = torch::empty_like(x);
    auto in = x.accessor<float, 1>();
    auto o = out.accessor<float, 1>();
    float run = 0;
    for (int64_t i = 0; i < in.size(0); ++i) o[i] = run += in[i];
    return out;
}
torch::Tensor exclusive(torch::Tensor x) {
    auto c = torch::cumsum(x, 1);
    return torch::cat({torch::zeros_like(x.select(1, 0).unsqueeze(1)), c.narrow(1, 0, x.size(1) - 1)}, 1);
}
torch::Tensor reverse_cumsum(torch::Tensor x) { return torch::flip(torch::cumsum(torch::flip(x, {1}), 1), {1}); }
torch::Tensor masked_cumsum(torch::Tensor x, torch::Tensor mask) { return (x * mask).cumsum(-1); }
