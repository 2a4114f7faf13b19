#include <torch/extension.h>

torch::Tensor cross_entropy_forward(torch::Tensor predictions, torch::Tensor targets) {
    TORCH_CHECK(predictions.dim() == 2, "predictions must be a 2D tensor");
    TORCH_CHECK(targets.dim() == 1, "targets must be a 1D tensor");
    TORCH_CHECK(targets.scalar_type() == torch::kInt64, "targets must be Long, got ", targets.scalar_type());
    auto p = predictions.accessor<float, 2>();
    auto t = targets.accessor<int64_t, 1>();
    float total = 0;
    for (int64_t i = 0; i < p.size(0); i++) {
        TORCH_CHECK_INDEX(t[i] >= 0 && t[i] < p.size(1), "Target ", t[i], " is out of bounds.");
        float m = p[i][0], s = 0;
        for (int64_t j = 1; j < p.size(1); j++) m = std::max(m, p[i][j]);
        for (int64_t j = 0; j < p.size(1); j++) s += std::exp(p[i][j] - m);
        total += m + std::log(s) - p[i][t[i]];
    }
    return torch::tensor({total / p.size(0)}, predictions.options()).squeeze();
}
