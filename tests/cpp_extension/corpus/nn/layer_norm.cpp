#include <torch/extension.h>

std::vector<at::Tensor> layer_norm(at::Tensor x, at::Tensor gamma, at::Tensor beta, double eps) {
    TORCH_CHECK(gamma.sizes() == at::IntArrayRef({x.size(-1)}), "gamma must have shape [", x.size(-1), "], got ", gamma.sizes());
    auto mean = x.mean(-1, true);
    auto var = (x - mean).pow(2).mean(-1, true);
    auto rstd = torch::rsqrt(var + eps);
    return {(x - mean) * rstd * gamma + beta, mean.squeeze(-1), rstd.squeeze(-1)};
}

at::Tensor layer_norm_aten(at::Tensor x, std::vector<int64_t> shape, c10::optional<at::Tensor> w, c10::optional<at::Tensor> b) {
    return at::layer_norm(x, shape, w.value_or(at::Tensor()), b.value_or(at::Tensor()), 1e-5, false);
}
