#include <torch/extension.h>

torch::Tensor ema(torch::Tensor x, double alpha) {
    TORCH_CHECK_VALUE(alpha > 0 && alpha <= 1, "alpha must be in (0, 1], got ", alpha);
    auto out = torch::empty_like(x);
    if (x.size(0) == 0) return out;
    out[0] = x[0];
    for (int64_t t = 1; t < x.size(0); ++t) out[t].copy_(alpha * x[t] + (1 - alpha) * out[t - 1]);
    return out;
}
torch::Tensor ema_list(torch::Tensor x, double alpha) {
    std::vector<torch::Tensor> steps;
    auto h = torch::zeros_like(x[0]);
    for (const auto& row : x.unbind(0)) {
        h = h.lerp(row, alpha);
        steps.push_back(h);
    }
    return torch::stack(steps);
}
