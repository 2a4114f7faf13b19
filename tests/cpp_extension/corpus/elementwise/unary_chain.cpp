#include <torch/extension.h>

torch::Tensor mish(torch::Tensor x) { return x * torch::tanh(torch::log1p(torch::exp(x))); }
torch::Tensor softsign(torch::Tensor x) { return x / (1 + x.abs()); }
torch::Tensor chain(torch::Tensor x) {
    return x.abs().sqrt().add(1).log().neg().exp().sin().cos().pow(2).mul(3).sub(0.25).div(2).round();
}
torch::Tensor powers(torch::Tensor x) { return torch::pow(x, 3) + torch::pow(2, x) + x.pow(0.5) + torch::square(x) + torch::rsqrt(x.abs() + 1); }
