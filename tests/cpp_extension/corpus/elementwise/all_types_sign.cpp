#include <torch/extension.h>

template <typename T>
static T sign(T v) { return (T(0) < v) - (v < T(0)); }

torch::Tensor sign_all(torch::Tensor x) {
    auto out = torch::empty_like(x, x.options(), at::MemoryFormat::Contiguous);
    auto in = x.contiguous();
    AT_DISPATCH_ALL_TYPES_AND2(at::ScalarType::Half, at::ScalarType::BFloat16, x.scalar_type(), "sign_all", [&] {
        for (int64_t i = 0; i < in.numel(); ++i)
            out.data_ptr<scalar_t>()[i] = static_cast<scalar_t>(sign<float>(static_cast<float>(in.data_ptr<scalar_t>()[i])));
    });
    return out;
}
