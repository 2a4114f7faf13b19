// The ops of call.py in C++: TORCH_LIBRARY and at::Tensor, with no more work than a call of 8 float32 elements needs; and
// for floors.py two that do nothing but hand out memory.

#include <torch/extension.h>

namespace {

at::Tensor allreduce_cpu(const at::Tensor& x, std::optional<at::ScalarType> dtype) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous(), "allreduce takes a contiguous float32 tensor here");
  TORCH_CHECK(!dtype || *dtype == at::kFloat, "allreduce returns float32 here");
  at::Tensor out = at::empty({}, x.options());
  const float* data = x.const_data_ptr<float>();
  double total = 0;
  for (int64_t i = 0, numel = x.numel(); i < numel; i++)
    total += data[i];
  *out.mutable_data_ptr<float>() = static_cast<float>(total);
  return out;
}

void scale_inplace_cpu(at::Tensor x, double a) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous(), "scale_inplace takes a contiguous float32 tensor");
  float* data = x.mutable_data_ptr<float>();
  for (int64_t i = 0, numel = x.numel(); i < numel; i++)
    data[i] *= static_cast<float>(a);
}

at::Tensor scalar_cpu(const at::Tensor& x) {
  return at::empty({}, x.options());
}

at::Tensor like_cpu(const at::Tensor& x) {
  return at::empty_like(x);
}

}  // namespace

TORCH_LIBRARY(peer, m) {
  m.def("allreduce(Tensor x, *, ScalarType? dtype=None) -> Tensor");
  m.def("scale_inplace(Tensor(a!) x, float a) -> ()");
  m.def("scalar(Tensor x) -> Tensor");
  m.def("like(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(peer, CPU, m) {
  m.impl("allreduce", &allreduce_cpu);
  m.impl("scale_inplace", &scale_inplace_cpu);
  m.impl("scalar", &scalar_cpu);
  m.impl("like", &like_cpu);
}
