#include <torch/extension.h>

#define CHECK_CPU(x) TORCH_CHECK(!x.device().is_cuda(), #x " must be a CPU tensor")
#define CHECK_CUDA(x) TORCH_CHECK(x.is_cuda(), #x " must be a CUDA tensor")
#define CHECK_SAME_DTYPE(a, b) TORCH_CHECK((a).dtype() == (b).dtype(), #a " and " #b " differ in dtype: ", (a).dtype(), ", ", (b).dtype())
#define CHECK_DIM(x, n) TORCH_CHECK((x).dim() == (n), "expected " #x " to have " #n " dimensions, got ", (x).dim(), " with sizes ", (x).sizes())

torch::Tensor needs_cuda(torch::Tensor x) { CHECK_CUDA(x); return x; }
torch::Tensor needs_same(torch::Tensor a, torch::Tensor b) { CHECK_CPU(a); CHECK_SAME_DTYPE(a, b); return a + b; }
torch::Tensor needs_2d(torch::Tensor x) { CHECK_DIM(x, 2); return x; }
torch::Tensor needs_positive(torch::Tensor x, int n) {
    TORCH_CHECK(n > 0, "n=", n, " x=", x.sizes(), " strides=", x.strides(), " device=", x.device(), " defined=", x.defined(), " list=", std::vector<int>{1, 2});
    TORCH_CHECK_EQ(n % 2, 0);
    TORCH_CHECK_LT(n, 10);
    return x;
}
