#include <torch/extension.h>

void add_one_(torch::Tensor x) { x.add_(1); }
void copy_into(torch::Tensor& dst, const torch::Tensor& src) { dst.copy_(src); }
void swap_rows_(torch::Tensor x, int64_t i, int64_t j) {
    auto saved = x[i].clone();
    x[i] = x[j];
    x[j] = saved;
}
void out_variant(torch::Tensor out, torch::Tensor a, torch::Tensor b) { at::add_out(out, a, b); at::mul_out(out, out, b); }
void raw(torch::Tensor x) {
    auto* p = static_cast<float*>(x.data_ptr());
    for (int64_t i = 0; i < x.numel(); ++i) p[i] = -p[i];
}
void zero_all(std::vector<torch::Tensor> xs) {
    for (auto& x : xs) x.zero_();
}
