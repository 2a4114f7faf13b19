#include <torch/extension.h>

torch::Tensor mm(torch::Tensor a, torch::Tensor b) { return torch::mm(a, b); }
torch::Tensor cat(std::vector<torch::Tensor> xs) { return torch::cat(xs); }
torch::Tensor far(torch::Tensor x) { return x[10]; }
torch::Tensor bad_dim(torch::Tensor x) { return x.sum(5); }
torch::Tensor bad_data(torch::Tensor x) { return torch::tensor(x.data_ptr<int>()[0]); }
torch::Tensor bad_accessor(torch::Tensor x) { return torch::tensor(x.accessor<float, 3>().size(0)); }
torch::Tensor bad_item(torch::Tensor x) { return torch::tensor(x.item<float>()); }
torch::Tensor undefined_add(torch::Tensor x) { torch::Tensor u; return u + x; }
torch::Tensor dispatch(torch::Tensor x) {
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "my_kernel", [&] { x.data_ptr<scalar_t>(); });
    return x;
}
torch::Tensor leaf(torch::Tensor x) { auto y = torch::ones_like(x, x.options().requires_grad(true)); y.add_(1); return y; }
int64_t undefined_dim() { torch::Tensor u; return u.dim(); }
at::ScalarType undefined_type() { torch::Tensor u; return u.scalar_type(); }
