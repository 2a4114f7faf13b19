#include <torch/extension.h>

torch::Tensor conj_mul(torch::Tensor a, torch::Tensor b) {
    TORCH_CHECK(a.is_complex() && b.is_complex(), "both must be complex");
    auto x = a.contiguous(), y = b.contiguous();
    auto out = torch::empty_like(x);
    AT_DISPATCH_COMPLEX_TYPES(x.scalar_type(), "conj_mul", [&] {
        auto* p = x.data_ptr<scalar_t>();
        auto* q = y.data_ptr<scalar_t>();
        auto* r = out.data_ptr<scalar_t>();
        for (int64_t i = 0; i < x.numel(); ++i) r[i] = p[i] * std::conj(q[i]);
    });
    return out;
}

torch::Tensor magnitude(torch::Tensor a) { return torch::abs(a) + torch::real(a) * torch::imag(a); }

c10::complex<double> first(torch::Tensor a) { return a.flatten()[0].item<c10::complex<double>>(); }
