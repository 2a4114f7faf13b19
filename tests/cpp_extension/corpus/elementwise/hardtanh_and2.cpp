#include <torch/extension.h>

at::Tensor hardtanh(const at::Tensor& self, double lo, double hi) {
    TORCH_CHECK_VALUE(lo <= hi, "min_val (", lo, ") must not exceed max_val (", hi, ")");
    at::Tensor in = self.contiguous();
    at::Tensor out = at::empty_like(in);
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, in.scalar_type(), "hardtanh", [&] {
        const scalar_t* p = in.const_data_ptr<scalar_t>();
        scalar_t* q = out.mutable_data_ptr<scalar_t>();
        const scalar_t low = static_cast<scalar_t>(lo), high = static_cast<scalar_t>(hi);
        for (int64_t i = 0; i < in.numel(); i++) q[i] = p[i] < low ? low : (p[i] > high ? high : p[i]);
    });
    return out;
}
