#include <torch/extension.h>
#include <cmath>

torch::Tensor rms_norm(torch::Tensor x, torch::Tensor weight, float eps) {
    TORCH_CHECK(x.is_contiguous() && weight.is_contiguous(), "rms_norm: inputs must be contiguous");
    const int64_t hidden = x.size(-1);
    TORCH_CHECK(weight.numel() == hidden, "rms_norm: weight has ", weight.numel(), " elements, expected ", hidden);
    const int64_t rows = x.numel() / hidden;
    auto out = torch::empty_like(x);
    AT_DISPATCH_FLOATING_TYPES_AND2(torch::kHalf, torch::kBFloat16, x.scalar_type(), "rms_norm", [&] {
        auto* px = x.data_ptr<scalar_t>();
        auto* pw = weight.data_ptr<scalar_t>();
        auto* po = out.data_ptr<scalar_t>();
        for (int64_t r = 0; r < rows; ++r) {
            float ss = 0.f;
            for (int64_t i = 0; i < hidden; ++i) ss += float(px[r * hidden + i]) * float(px[r * hidden + i]);
            float inv = 1.f / std::sqrt(ss / hidden + eps);
            for (int64_t i = 0; i < hidden; ++i) po[r * hidden + i] = scalar_t(float(px[r * hidden + i]) * inv * float(pw[i]));
        }
    });
    return out;
}
