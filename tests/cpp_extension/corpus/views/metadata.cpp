#include <torch/extension.h>

std::vector<int64_t> numbers(torch::Tensor x) {
    std::vector<int64_t> out = {x.dim(), x.numel(), int64_t(x.element_size()), int64_t(x.itemsize()), int64_t(x.nbytes()), x.storage_offset(), x.ndimension()};
    for (auto s : x.sizes()) out.push_back(s);
    for (int64_t d = 0; d < x.dim(); ++d) out.push_back(x.stride(d));
    return out;
}
std::vector<bool> flags(const torch::Tensor& x) {
    return {x.is_contiguous(), x.is_cuda(), x.is_cpu(), x.requires_grad(), x.defined(), x.is_floating_point(), x.is_complex(), x.is_sparse(), x.is_leaf(),
            x.is_signed(), x.is_non_overlapping_and_dense(), x.device().is_cpu(), x.device() == torch::kCPU, x.has_storage(), x.is_quantized(), x.is_view(),
            x.layout() == torch::kStrided, x.dtype() == torch::kFloat32, x.scalar_type() == at::ScalarType::Float, x.is_contiguous(at::MemoryFormat::ChannelsLast),
            x.is_same_size(x), x.is_same(x), x.is_inference(), x.is_conj(), x.is_neg()};
}
int64_t last(torch::Tensor x) { return x.size(-1); }
int64_t size_at(torch::Tensor x, int64_t d) { return x.size(d); }
int64_t stride_at(torch::Tensor x, int64_t d) { return x.stride(d); }
std::string text(torch::Tensor x) {
    std::stringstream s;
    s << x.sizes() << " " << x.strides() << " " << x.dtype() << " " << x.device() << " " << x.layout() << " " << x.scalar_type() << " " << x.toString();
    return s.str();
}
std::vector<int64_t> copied(torch::Tensor x) { return x.sizes().vec(); }
