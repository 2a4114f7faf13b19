#include <torch/extension.h>

template <typename scalar_t>
__global__ void transpose_kernel(const torch::PackedTensorAccessor32<scalar_t, 2, torch::RestrictPtrTraits> in, torch::PackedTensorAccessor32<scalar_t, 2, torch::RestrictPtrTraits> out) {
    const int i = blockIdx.y * blockDim.y + threadIdx.y, j = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < in.size(0) && j < in.size(1)) out[j][i] = in[i][j];
}

torch::Tensor transpose_cuda(torch::Tensor x) {
    auto out = torch::empty({x.size(1), x.size(0)}, x.options());
    const dim3 threads(8, 8);
    const dim3 blocks((x.size(1) + 7) / 8, (x.size(0) + 7) / 8);
    AT_DISPATCH_ALL_TYPES(x.scalar_type(), "transpose_cuda", ([&] {
        transpose_kernel<scalar_t><<<blocks, threads>>>(x.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>(), out.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>());
    }));
    return out;
}
