#include <torch/extension.h>

torch::Tensor solve(torch::Tensor a, torch::Tensor b) { return torch::linalg_solve(a, b); }
torch::Tensor inverse(torch::Tensor a) { return torch::inverse(a).matmul(a); }
torch::Tensor determinant(torch::Tensor a) { return torch::det(a) + torch::trace(a); }
torch::Tensor cholesky(torch::Tensor a) { return at::linalg_cholesky(a.matmul(a.t()) + torch::eye(a.size(0), a.options())); }
std::tuple<torch::Tensor, torch::Tensor> qr(torch::Tensor a) { return torch::linalg_qr(a, "reduced"); }
torch::Tensor fft(torch::Tensor x) { return torch::fft::rfft(x); }
torch::Tensor l2(torch::Tensor x) { return torch::linalg_vector_norm(x, 2); }
