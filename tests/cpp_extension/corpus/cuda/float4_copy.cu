#include <torch/extension.h>

__global__ void copy_kernel(const float4* __restrict__ in, float4* __restrict__ out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        float4 v = __ldg(in + i);
        out[i] = make_float4(v.x * 2, v.y * 2, v.z * 2, v.w * 2);
    }
}

torch::Tensor copy_vectorized(torch::Tensor x) {
    TORCH_CHECK(x.numel() % 4 == 0, "numel must be divisible by 4, got ", x.numel());
    auto y = torch::empty_like(x);
    int n = x.numel() / 4;
    copy_kernel<<<(n + 127) / 128, 128>>>(reinterpret_cast<float4*>(x.data_ptr<float>()), reinterpret_cast<float4*>(y.data_ptr<float>()), n);
    return y;
}
