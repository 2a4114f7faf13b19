#include <torch/extension.h>

torch::Tensor gather(torch::Tensor x, int64_t dim, torch::Tensor index) { return torch::gather(x, dim, index); }
torch::Tensor take(torch::Tensor x, torch::Tensor index) { return x.take(index) + torch::index_select(x.flatten(), 0, index); }
void scatter_(torch::Tensor x, torch::Tensor index, double value) { x.scatter_(1, index, value); }
torch::Tensor where3(torch::Tensor c, torch::Tensor a, torch::Tensor b) { return torch::where(c, a, b) + torch::where(c, 1.0, b) + at::where(c, a, 0); }
std::vector<torch::Tensor> where1(torch::Tensor c) { return torch::where(c); }
torch::Tensor fill_diagonal(torch::Tensor x, double v) { return x.clone().fill_diagonal_(v) + torch::diag(x) + x.diagonal(); }
