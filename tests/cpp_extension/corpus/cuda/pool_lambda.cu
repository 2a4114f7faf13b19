#include <torch/extension.h>
#include <limits>
#include <algorithm>

template <typename scalar_t, int THREADS = 128>
__global__ void __launch_bounds__(THREADS) pool_kernel(const scalar_t* x, scalar_t* y, int rows, int in, int out, int kernel, int stride) {
    int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= rows * out) return;
    int r = i / out, o = i % out;
    scalar_t best = x[r * in + o * stride];
    for (int k = 1; k < kernel; ++k) {
        scalar_t v = x[r * in + o * stride + k];
        best = v > best ? v : best;
    }
    y[i] = best;
}

torch::Tensor max_pool1d(torch::Tensor x, int kernel, int stride) {
    if (stride <= 0) throw std::invalid_argument("stride must be positive");
    const int in = x.size(-1), out = (in - kernel) / stride + 1, rows = x.numel() / in;
    auto shape = x.sizes().vec();
    shape.back() = out;
    auto y = torch::empty(shape, x.options());
    auto launch = [&](int blocks) {
        AT_DISPATCH_FLOATING_TYPES_AND2(at::ScalarType::Half, at::ScalarType::BFloat16, x.scalar_type(), "max_pool1d", [&] {
            pool_kernel<scalar_t><<<blocks, 128>>>(x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), rows, in, out, kernel, stride);
        });
    };
    launch((rows * out + 127) / 128);
    return y;
}
