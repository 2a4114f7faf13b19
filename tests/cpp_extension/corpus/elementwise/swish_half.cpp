#include <torch/extension.h>

torch::Tensor swish(torch::Tensor x) {
    auto y = torch::empty(x.sizes(), x.options());
    auto xc = x.contiguous();
    AT_DISPATCH_FLOATING_TYPES_AND_HALF(x.scalar_type(), "swish", [&] {
        auto a = xc.data_ptr<scalar_t>();
        auto b = y.data_ptr<scalar_t>();
        for (int64_t i = 0; i < xc.numel(); i++) {
            float v = static_cast<float>(a[i]);
            b[i] = static_cast<scalar_t>(v / (1.0f + expf(-v)));
        }
    });
    return y;
}
