#include <torch/extension.h>
#include <cmath>

template <typename scalar_t>
static inline scalar_t silu_scalar(scalar_t v) {
    return v / (scalar_t(1) + std::exp(-v));
}

torch::Tensor silu_forward(const torch::Tensor& x) {
    auto in = x.contiguous();
    auto out = torch::empty_like(in);
    AT_DISPATCH_FLOATING_TYPES(in.scalar_type(), "silu_forward", ([&] {
        const scalar_t* src = in.data_ptr<scalar_t>();
        scalar_t* dst = out.data_ptr<scalar_t>();
        for (int64_t i = 0; i < in.numel(); ++i) dst[i] = silu_scalar<scalar_t>(src[i]);
    }));
    return out;
}

torch::Tensor silu_backward(const torch::Tensor& grad, const torch::Tensor& x) {
    auto s = torch::sigmoid(x);
    return grad * (s * (1 + x * (1 - s)));
}
