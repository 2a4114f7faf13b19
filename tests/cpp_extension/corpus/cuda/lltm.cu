#include <torch/extension.h>

#include <cuda.h>
#include <cuda_runtime.h>

#include <vector>

namespace {
template <typename scalar_t>
__device__ __forceinline__ scalar_t sigmoid(scalar_t z) {
  return 1.0 / (1.0 + exp(-z));
}

template <typename scalar_t>
__device__ __forceinline__ scalar_t elu(scalar_t z, scalar_t alpha = 1.0) {
  return fmax(0.0, z) + fmin(0.0, alpha * (exp(z) - 1.0));
}

template <typename scalar_t>
__global__ void lltm_cuda_forward_kernel(
    const torch::PackedTensorAccessor<scalar_t, 3, torch::RestrictPtrTraits, size_t> gates,
    const torch::PackedTensorAccessor<scalar_t, 2, torch::RestrictPtrTraits, size_t> old_cell,
    torch::PackedTensorAccessor<scalar_t, 2, torch::RestrictPtrTraits, size_t> new_h,
    torch::PackedTensorAccessor<scalar_t, 2, torch::RestrictPtrTraits, size_t> new_cell) {
  const int n = blockIdx.y;
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c < gates.size(2)) {
    auto input_gate = sigmoid(gates[n][0][c]);
    auto output_gate = sigmoid(gates[n][1][c]);
    auto candidate_cell = elu(gates[n][2][c]);
    new_cell[n][c] = old_cell[n][c] + candidate_cell * input_gate;
    new_h[n][c] = tanh(new_cell[n][c]) * output_gate;
  }
}
} // namespace

std::vector<torch::Tensor> lltm_cuda_forward(torch::Tensor input, torch::Tensor weights, torch::Tensor bias, torch::Tensor old_h, torch::Tensor old_cell) {
  auto X = torch::cat({old_h, input}, /*dim=*/1);
  auto gate_weights = torch::addmm(bias, X, weights.transpose(0, 1));
  const auto batch_size = old_cell.size(0);
  const auto state_size = old_cell.size(1);
  auto gates = gate_weights.reshape({batch_size, 3, state_size});
  auto new_h = torch::zeros_like(old_cell);
  auto new_cell = torch::zeros_like(old_cell);
  const int threads = 1024;
  const dim3 blocks((state_size + threads - 1) / threads, batch_size);
  AT_DISPATCH_FLOATING_TYPES(gates.scalar_type(), "lltm_forward_cuda", ([&] {
    lltm_cuda_forward_kernel<scalar_t><<<blocks, threads>>>(
        gates.packed_accessor<scalar_t, 3, torch::RestrictPtrTraits, size_t>(),
        old_cell.packed_accessor<scalar_t, 2, torch::RestrictPtrTraits, size_t>(),
        new_h.packed_accessor<scalar_t, 2, torch::RestrictPtrTraits, size_t>(),
        new_cell.packed_accessor<scalar_t, 2, torch::RestrictPtrTraits, size_t>());
  }));
  return {new_h, new_cell, X, gates};
}
