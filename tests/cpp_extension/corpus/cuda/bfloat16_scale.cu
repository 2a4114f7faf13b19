#include <torch/extension.h>
#include <cuda_bf16.h>

__global__ void scale_kernel(const __nv_bfloat16* x, __nv_bfloat16* y, float s, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = __float2bfloat16(__bfloat162float(x[i]) * s);
}

torch::Tensor scale(torch::Tensor x, float s) {
    TORCH_CHECK(x.dtype() == torch::kBFloat16, "bfloat16 expected");
    auto y = torch::empty_like(x);
    const auto n = static_cast<int>(x.numel());
    scale_kernel<<<(n + 255) / 256, 256>>>(reinterpret_cast<__nv_bfloat16*>(x.data_ptr<at::BFloat16>()), (__nv_bfloat16*)y.data_ptr(), s, n);
    return y;
}
