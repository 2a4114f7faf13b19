#include <torch/extension.h>

std::vector<torch::Tensor> converted(torch::Tensor x) {
    return {x.to(torch::kDouble), x.to(torch::kHalf), x.to(x.options().dtype(torch::kInt)), x.toType(torch::kLong), x.to(torch::kCPU), x.cpu(),
            x.to(torch::kCPU, torch::kBFloat16), x.type_as(torch::zeros(1, torch::kInt8)), x.to(torch::zeros(1, torch::kFloat64)), x.to(torch::kBool),
            x.to(torch::kFloat, /*non_blocking=*/false, /*copy=*/true), x.contiguous(), x.clone(), x.clone(at::MemoryFormat::Contiguous)};
}
torch::Tensor to_dtype(torch::Tensor x, torch::Dtype dtype) { return x.to(dtype); }
at::ScalarType dtype_of(torch::Tensor x) { return x.scalar_type(); }
torch::Device device_of(torch::Tensor x) { return x.device(); }
torch::Tensor to_device(torch::Tensor x, torch::Device d) { return x.to(d); }
at::ScalarType promoted(torch::Tensor a, torch::Tensor b) { return at::result_type(a, b); }
torch::Tensor copied(torch::Tensor x, torch::Tensor y) { return x.clone().copy_(y); }
