// The op `allreduce` as the C++ tutorial writes it: torch/extension.h, TORCH_LIBRARY, at::Tensor.
//
// The same function as opjit's: the sum of all elements with torch.sum's dtype rules, any real dtype and any strides.
// cold.py builds this file with torch.utils.cpp_extension.load, for CUDA together with allreduce_ext.cu.

#include <ATen/AccumulateType.h>
#include <torch/extension.h>

namespace {

at::ScalarType result_dtype(const at::Tensor& x, std::optional<at::ScalarType> dtype) {
  if (dtype)
    return *dtype;
  return at::isIntegralType(x.scalar_type(), /*includeBool=*/true) ? at::kLong : x.scalar_type();
}

at::Tensor allreduce_cpu(const at::Tensor& x, std::optional<at::ScalarType> dtype) {
  at::ScalarType type = result_dtype(x, dtype);
  at::Tensor input = (x.scalar_type() == type ? x : x.to(type)).contiguous();
  at::Tensor out = at::empty({}, input.options());
  AT_DISPATCH_ALL_TYPES_AND3(at::kBool, at::kHalf, at::kBFloat16, type, "allreduce", [&] {
    using total_t = at::acc_type<scalar_t, /*is_cuda=*/false>;
    const scalar_t* data = input.const_data_ptr<scalar_t>();
    auto sum = [data](int64_t begin, int64_t end, total_t total) {
      for (int64_t i = begin; i < end; i++)
        total += static_cast<total_t>(data[i]);
      return total;
    };
    total_t total = at::parallel_reduce(0, input.numel(), 32768, total_t(0), sum, std::plus<total_t>());
    *out.mutable_data_ptr<scalar_t>() = static_cast<scalar_t>(total);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY(peer, m) {
  m.def("allreduce(Tensor x, *, ScalarType? dtype=None) -> Tensor");
}

TORCH_LIBRARY_IMPL(peer, CPU, m) {
  m.impl("allreduce", &allreduce_cpu);
}
