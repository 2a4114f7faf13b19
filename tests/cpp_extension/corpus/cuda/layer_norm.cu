#include <torch/extension.h>
#include <vector>

template <typename scalar_t>
__global__ void layer_norm_kernel(const scalar_t* x, const scalar_t* w, const scalar_t* b, scalar_t* y, scalar_t* mean, scalar_t* rstd, int rows, int cols, scalar_t eps) {
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= rows) return;
    scalar_t m = 0, v = 0;
    for (int c = 0; c < cols; ++c) m += x[r * cols + c];
    m /= cols;
    for (int c = 0; c < cols; ++c) v += (x[r * cols + c] - m) * (x[r * cols + c] - m);
    scalar_t s = rsqrt(v / cols + eps);
    for (int c = 0; c < cols; ++c) y[r * cols + c] = (x[r * cols + c] - m) * s * w[c] + b[c];
    mean[r] = m;
    rstd[r] = s;
}

std::vector<torch::Tensor> layer_norm(torch::Tensor x, torch::Tensor weight, torch::Tensor bias, double eps) {
    const int rows = x.size(0), cols = x.size(1);
    auto y = torch::empty_like(x);
    auto mean = torch::empty({rows}, x.options()), rstd = torch::empty({rows}, x.options());
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "layer_norm", ([&] {
        layer_norm_kernel<scalar_t><<<(rows + 31) / 32, 32>>>(x.data_ptr<scalar_t>(), weight.data_ptr<scalar_t>(), bias.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(),
                                                             mean.data_ptr<scalar_t>(), rstd.data_ptr<scalar_t>(), rows, cols, scalar_t(eps));
    }));
    return {y, mean, rstd};
}
