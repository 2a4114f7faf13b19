#include <torch/extension.h>
#include <vector>

__constant__ float c_weights[3];

__global__ void blur_kernel(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float left = i > 0 ? x[i - 1] : 0.f, right = i + 1 < n ? x[i + 1] : 0.f;
    y[i] = left * c_weights[0] + x[i] * c_weights[1] + right * c_weights[2];
}

torch::Tensor blur(torch::Tensor x, std::vector<double> weights) {
    TORCH_CHECK_VALUE(weights.size() == 3, "three weights expected, got ", weights.size());
    float host[3] = {float(weights[0]), float(weights[1]), float(weights[2])};
    cudaMemcpyToSymbol(c_weights, host, sizeof(host));
    auto y = torch::empty_like(x);
    blur_kernel<<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.numel());
    return y;
}
