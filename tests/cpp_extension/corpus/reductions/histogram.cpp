#include <torch/extension.h>

torch::Tensor histogram(torch::Tensor x, int bins, double lo, double hi) {
    if (bins <= 0) throw std::invalid_argument("bins must be positive");
    if (hi <= lo) throw std::domain_error("empty range");
    auto counts = torch::zeros(bins, torch::kInt64);
    auto c = counts.accessor<int64_t, 1>();
    auto flat = x.flatten().to(torch::kDouble);
    auto p = flat.accessor<double, 1>();
    for (int64_t i = 0; i < flat.size(0); i++) {
        int64_t b = static_cast<int64_t>((p[i] - lo) / (hi - lo) * bins);
        if (b >= 0 && b < bins) c[b]++;
    }
    return counts;
}
torch::Tensor bincount(torch::Tensor x) { return torch::bincount(x, {}, 8); }
