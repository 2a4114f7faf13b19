#include <torch/extension.h>
#include <cmath>

at::Tensor attention(at::Tensor q, at::Tensor k, at::Tensor v, c10::optional<at::Tensor> mask, bool causal) {
    TORCH_CHECK(q.dim() == 3, "q must be [batch, seq, dim]");
    auto scores = at::matmul(q, k.transpose(-2, -1)) / std::sqrt(static_cast<double>(q.size(-1)));
    if (mask) scores = scores.masked_fill(mask->logical_not(), -1e9);
    if (causal) {
        auto upper = at::triu(at::ones({q.size(1), k.size(1)}, q.options().dtype(at::kBool)), 1);
        scores.masked_fill_(upper, -std::numeric_limits<float>::infinity());
    }
    return at::matmul(at::softmax(scores, -1), v);
}
