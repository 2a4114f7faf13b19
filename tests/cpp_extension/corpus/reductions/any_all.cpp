#include <torch/extension.h>

bool any_nan(torch::Tensor x) { return torch::isnan(x).any().item<bool>(); }
bool all_positive(torch::Tensor x) { return (x > 0).all().item<bool>(); }
bool close(torch::Tensor a, torch::Tensor b, double rtol) { return torch::allclose(a, b, rtol); }
bool same(torch::Tensor a, torch::Tensor b) { return a.equal(b) && torch::equal(a, b); }
int64_t nonzero(torch::Tensor x) { return x.count_nonzero().item<int64_t>(); }
