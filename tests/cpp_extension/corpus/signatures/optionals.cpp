#include <torch/extension.h>

torch::Tensor add_bias(torch::Tensor x, std::optional<torch::Tensor> bias) { return bias ? x + *bias : x; }
torch::Tensor c10_bias(torch::Tensor x, const c10::optional<torch::Tensor>& bias) {
    if (bias.has_value() && bias->defined()) return x + bias.value();
    return x.clone();
}
double scale(c10::optional<double> s) { return s.value_or(1.5); }
int64_t axis(std::optional<int64_t> a) { return a.has_value() ? *a : -1; }
std::optional<int64_t> find(std::vector<int64_t> v, int64_t x) {
    for (size_t i = 0; i < v.size(); ++i)
        if (v[i] == x) return static_cast<int64_t>(i);
    return std::nullopt;
}
std::optional<torch::Tensor> maybe(torch::Tensor x, bool keep) { return keep ? std::make_optional(x) : c10::nullopt; }
std::string name(std::optional<std::string> n) { return n.value_or("nobody"); }
torch::Tensor undefined() { return torch::Tensor(); }
std::vector<torch::Tensor> with_undefined(torch::Tensor x) { return {x, torch::Tensor()}; }
