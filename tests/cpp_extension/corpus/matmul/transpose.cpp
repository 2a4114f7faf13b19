#include <torch/extension.h>

torch::Tensor transpose_blocked(torch::Tensor x) {
    TORCH_CHECK(x.dim() == 2);
    const int64_t B = 3, n = x.size(0), m = x.size(1);
    auto in = x.contiguous();
    auto out = at::empty({m, n}, x.options());
    AT_DISPATCH_ALL_TYPES_AND(at::kBool, x.scalar_type(), "transpose_blocked", [&] {
        for (int64_t i0 = 0; i0 < n; i0 += B)
            for (int64_t j0 = 0; j0 < m; j0 += B)
                for (int64_t i = i0; i < std::min(i0 + B, n); ++i)
                    for (int64_t j = j0; j < std::min(j0 + B, m); ++j)
                        out.data_ptr<scalar_t>()[j * n + i] = in.data_ptr<scalar_t>()[i * m + j];
    });
    return out;
}
