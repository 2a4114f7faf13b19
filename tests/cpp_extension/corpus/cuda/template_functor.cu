#include <torch/extension.h>

template <typename T> struct Square { __device__ T operator()(T v) const { return v * v; } };
template <typename T> struct Shift { T by; __device__ T operator()(T v) const { return v + by; } };

template <typename T, typename F>
__global__ void map_kernel(const T* in, T* out, int64_t n, F f) {
    int64_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = f(in[i]);
}
template <typename T, typename F>
static void map(const torch::Tensor& x, torch::Tensor& y, F f) {
    if (x.numel()) map_kernel<T, F><<<(x.numel() + 255) / 256, 256>>>(x.const_data_ptr<T>(), y.mutable_data_ptr<T>(), x.numel(), f);
}
torch::Tensor square(torch::Tensor x) {
    auto in = x.contiguous();
    auto y = torch::empty_like(in);
    AT_DISPATCH_ALL_TYPES(x.scalar_type(), "square", [&] { map<scalar_t>(in, y, Square<scalar_t>{}); });
    return y;
}
torch::Tensor shift(torch::Tensor x, double by) {
    auto in = x.contiguous();
    auto y = torch::empty_like(in);
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "shift", [&] { map<scalar_t>(in, y, Shift<scalar_t>{static_cast<scalar_t>(by)}); });
    return y;
}
