#include <torch/extension.h>

__global__ void negate_kernel(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = -x[i];
}

torch::Tensor negate(torch::Tensor x) {
    auto y = torch::empty_like(x);
    negate_kernel<<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.numel());
    return y;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("negate", &negate, "negate (CUDA)", pybind11::arg("x"));
}
