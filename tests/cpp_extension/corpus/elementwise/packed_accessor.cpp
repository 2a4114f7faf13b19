#include <torch/extension.h>

template <typename T>
void add_one_packed(torch::PackedTensorAccessor32<T, 2> in, torch::PackedTensorAccessor32<T, 2> out) {
    for (int i = 0; i < in.size(0); i++)
        for (int j = 0; j < in.size(1); j++) out[i][j] = in[i][j] + T(1);
}

torch::Tensor add_one(torch::Tensor x) {
    auto y = torch::empty_like(x);
    AT_DISPATCH_ALL_TYPES(x.scalar_type(), "add_one", [&] {
        add_one_packed<scalar_t>(x.packed_accessor32<scalar_t, 2>(), y.packed_accessor32<scalar_t, 2>());
    });
    return y;
}

double corner(torch::Tensor x) {
    auto a = x.packed_accessor64<double, 2>();
    return a[a.size(0) - 1][a.size(1) - 1] + a.stride(0);
}
