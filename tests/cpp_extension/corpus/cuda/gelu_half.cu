#include <torch/extension.h>
#include <cuda_fp16.h>

template <typename scalar_t>
__global__ void gelu_kernel(const scalar_t* x, scalar_t* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = static_cast<float>(x[i]);
    y[i] = static_cast<scalar_t>(0.5f * v * (1.0f + erff(v * 0.70710678f)));
}

torch::Tensor gelu(torch::Tensor x) {
    TORCH_CHECK(x.device().is_cuda(), "x must be a CUDA tensor");
    auto in = x.contiguous();
    auto y = torch::empty_like(in);
    int n = in.numel();
    if (n > 0) {
        AT_DISPATCH_FLOATING_TYPES_AND_HALF(in.scalar_type(), "gelu", [&] {
            gelu_kernel<scalar_t><<<(n + 127) / 128, 128>>>(in.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), n);
        });
    }
    return y;
}
