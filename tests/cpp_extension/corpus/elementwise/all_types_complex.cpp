#include <torch/extension.h>

torch::Tensor twice(torch::Tensor x) {
    auto in = x.contiguous();
    auto out = at::empty(in.sizes(), in.options());
    AT_DISPATCH_ALL_TYPES_AND_COMPLEX_AND3(at::kHalf, at::kBFloat16, at::kBool, in.scalar_type(), "twice", [&] {
        for (int64_t i = 0; i < in.numel(); i++) out.data_ptr<scalar_t>()[i] = in.data_ptr<scalar_t>()[i] + in.data_ptr<scalar_t>()[i];
    });
    return out;
}
torch::Tensor floats_and_complex(torch::Tensor x) {
    auto in = x.contiguous();
    auto out = at::empty_like(in);
    AT_DISPATCH_FLOATING_AND_COMPLEX_TYPES(in.scalar_type(), "floats_and_complex", [&] {
        for (int64_t i = 0; i < in.numel(); i++) out.data_ptr<scalar_t>()[i] = in.data_ptr<scalar_t>()[i] * scalar_t(3);
    });
    return out;
}
