#include <torch/extension.h>
#include <cuda.h>
#include <cuda_runtime.h>

#define CHECK_CUDA(x) TORCH_CHECK(x.is_cuda(), #x " must be a CUDA tensor")
#define CHECK_CONTIGUOUS(x) TORCH_CHECK(x.is_contiguous(), #x " must be contiguous")
#define CHECK_INPUT(x) CHECK_CUDA(x); CHECK_CONTIGUOUS(x)

template <typename scalar_t>
__global__ void relu_kernel(const scalar_t* __restrict__ in, scalar_t* __restrict__ out, int64_t n) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)blockDim.x * gridDim.x)
        out[i] = in[i] > scalar_t(0) ? in[i] : scalar_t(0);
}

static void launch(const torch::Tensor& x, torch::Tensor& out) {
    const int64_t n = x.numel();
    if (n == 0) return;
    const int threads = 256;
    const int blocks = std::min<int64_t>((n + threads - 1) / threads, 1024);
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "relu_cuda", ([&] {
        relu_kernel<scalar_t><<<blocks, threads>>>(x.data_ptr<scalar_t>(), out.data_ptr<scalar_t>(), n);
    }));
}
torch::Tensor relu_cuda(torch::Tensor x) {
    CHECK_INPUT(x);
    auto out = torch::empty_like(x);
    launch(x, out);
    return out;
}
void relu_cuda_(torch::Tensor x) {
    CHECK_INPUT(x);
    launch(x, x);
}
