#include <torch/extension.h>

torch::Tensor popcount(torch::Tensor x) {
    auto in = x.contiguous();
    auto out = torch::zeros(in.sizes(), in.options().dtype(torch::kInt32));
    int* o = out.data_ptr<int>();
    AT_DISPATCH_INTEGRAL_TYPES(in.scalar_type(), "popcount", [&] {
        const scalar_t* p = in.data_ptr<scalar_t>();
        for (int64_t i = 0; i < in.numel(); ++i) {
            auto v = static_cast<std::make_unsigned_t<scalar_t>>(p[i]);
            int n = 0;
            while (v) { n += v & 1; v >>= 1; }
            o[i] = n;
        }
    });
    return out;
}

torch::Tensor bit_ops(torch::Tensor a, torch::Tensor b) { return (a & b) | (~a & ~b); }
torch::Tensor xor_(torch::Tensor a, torch::Tensor b) { return a ^ b; }
