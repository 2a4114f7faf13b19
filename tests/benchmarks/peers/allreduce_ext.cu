// The CUDA half of allreduce_ext.cpp, as the C++/CUDA tutorial writes it: torch/extension.h, at::Tensor, one launcher.
//
// Two launches: each block sums a part of the input, then one block sums the blocks' totals.

#include <torch/extension.h>

#include <ATen/AccumulateType.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

namespace {

constexpr int kThreads = 256;

template <typename from_t, typename total_t, typename to_t>
__global__ void sum_kernel(const from_t* from, int64_t numel, to_t* to) {
  __shared__ total_t totals[kThreads];
  total_t total = 0;
  int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < numel; i += step)
    total += static_cast<total_t>(from[i]);
  totals[threadIdx.x] = total;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half)
      totals[threadIdx.x] += totals[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0)
    to[blockIdx.x] = static_cast<to_t>(totals[0]);
}

at::ScalarType result_dtype(const at::Tensor& x, std::optional<at::ScalarType> dtype) {
  if (dtype)
    return *dtype;
  return at::isIntegralType(x.scalar_type(), /*includeBool=*/true) ? at::kLong : x.scalar_type();
}

at::Tensor allreduce_cuda(const at::Tensor& x, std::optional<at::ScalarType> dtype) {
  const c10::cuda::CUDAGuard guard(x.device());
  at::ScalarType type = result_dtype(x, dtype);
  at::Tensor input = (x.scalar_type() == type ? x : x.to(type)).contiguous();
  at::Tensor out = at::empty({}, input.options());
  int blocks = static_cast<int>(std::clamp<int64_t>(input.numel() / (kThreads * 16), 1, 1024));
  cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  AT_DISPATCH_ALL_TYPES_AND3(at::kBool, at::kHalf, at::kBFloat16, type, "allreduce", [&] {
    using total_t = at::acc_type<scalar_t, /*is_cuda=*/true>;
    at::Tensor totals = at::empty({blocks}, input.options().dtype(c10::CppTypeToScalarType<total_t>::value));
    sum_kernel<scalar_t, total_t, total_t><<<blocks, kThreads, 0, stream>>>(
        input.const_data_ptr<scalar_t>(), input.numel(), totals.mutable_data_ptr<total_t>());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    sum_kernel<total_t, total_t, scalar_t><<<1, kThreads, 0, stream>>>(
        totals.const_data_ptr<total_t>(), blocks, out.mutable_data_ptr<scalar_t>());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(peer, CUDA, m) {
  m.impl("allreduce", &allreduce_cuda);
}
