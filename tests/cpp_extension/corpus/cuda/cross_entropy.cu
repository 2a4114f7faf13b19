#include <torch/extension.h>

__global__ void ce_kernel(const float* logits, const int64_t* target, float* losses, int rows, int cols) {
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= rows) return;
    const float* row = logits + r * cols;
    float m = row[0], s = 0.f;
    for (int c = 1; c < cols; ++c) m = max(m, row[c]);
    for (int c = 0; c < cols; ++c) s += __expf(row[c] - m);
    losses[r] = m + logf(s) - row[target[r]];
}

torch::Tensor cross_entropy(torch::Tensor logits, torch::Tensor target) {
    TORCH_CHECK(target.dtype() == torch::kInt64, "target must be int64");
    auto losses = torch::empty({logits.size(0)}, logits.options());
    ce_kernel<<<(logits.size(0) + 63) / 64, 64>>>(logits.data_ptr<float>(), target.data_ptr<int64_t>(), losses.data_ptr<float>(), logits.size(0), logits.size(1));
    return losses.mean();
}
