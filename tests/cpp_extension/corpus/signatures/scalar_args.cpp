#include <torch/extension.h>

torch::Tensor add_scalar(torch::Tensor x, at::Scalar s) { return x + s; }
std::string kind(const c10::Scalar& s) {
    if (s.isBoolean()) return "bool";
    if (s.isIntegral(false)) return "int";
    if (s.isFloatingPoint()) return "float";
    return s.isComplex() ? "complex" : "other";
}
double to_double(at::Scalar s) { return s.to<double>(); }
int64_t to_long(at::Scalar s) { return s.toLong(); }
torch::Tensor fill(torch::Tensor x, at::Scalar s) { return x.clone().fill_(s); }
torch::Tensor dtype_arg(std::vector<int64_t> shape, at::ScalarType t) { return torch::zeros(shape, t); }
torch::Tensor opt_dtype(torch::Tensor x, std::optional<torch::Dtype> t) { return x.to(t.value_or(torch::kFloat16)); }
at::Scalar negate(at::Scalar s) { return -s; }
