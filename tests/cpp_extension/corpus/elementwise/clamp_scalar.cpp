#include <torch/extension.h>

torch::Tensor clamp_both(torch::Tensor x, at::Scalar lo, at::Scalar hi) { return torch::clamp(x, lo, hi); }
torch::Tensor clamp_low(torch::Tensor x, double lo) { return x.clamp_min(lo); }
torch::Tensor clamp_opt(torch::Tensor x, std::optional<double> lo, std::optional<double> hi) {
    if (!lo && !hi) return x;
    if (lo && hi) return x.clamp(*lo, *hi);
    return lo.has_value() ? x.clamp_min(lo.value()) : x.clamp_max(hi.value());
}
void clamp_inplace(torch::Tensor& x, double lo, double hi) { x.clamp_(lo, hi); }
