#include <torch/extension.h>

torch::Tensor l2(torch::Tensor x) { return x.norm(); }
torch::Tensor lp(torch::Tensor x, double p, int64_t dim) { return torch::norm(x, p, dim); }
torch::Tensor frobenius(torch::Tensor x) { return torch::sqrt((x * x).sum()); }
torch::Tensor normalize_l2(torch::Tensor x) { return x / (x.norm(2, 1, true) + 1e-12); }
double inf_norm(torch::Tensor x) { return x.abs().max().item().toDouble(); }
