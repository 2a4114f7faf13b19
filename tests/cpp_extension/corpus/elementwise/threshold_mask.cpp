#include <torch/extension.h>

at::Tensor threshold(const at::Tensor& x, double t, double value) {
    at::Tensor mask = x.le(t);
    return x.masked_fill(mask, value);
}
at::Tensor select_true(const at::Tensor& x, const at::Tensor& mask) {
    TORCH_CHECK(mask.scalar_type() == at::kBool, "mask must be a bool tensor");
    return x.masked_select(mask);
}
at::Tensor count_true(const at::Tensor& mask) {
    int64_t n = 0;
    auto m = mask.contiguous();
    const bool* p = m.data_ptr<bool>();
    for (int64_t i = 0; i < m.numel(); i++) n += p[i];
    return torch::tensor(n);
}
