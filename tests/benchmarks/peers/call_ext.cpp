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

at::Tensor scale_cpu(const at::Tensor& x, double a) {
  TORCH_CHECK(x.scalar_type() == at::kFloat, "scale takes a float32 tensor");
  at::Tensor from = x.contiguous();
  at::Tensor out = at::empty_like(from);
  const float* data = from.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  for (int64_t i = 0; i < from.numel(); i++)
    to[i] = data[i] * static_cast<float>(a);
  return out;
}

at::Tensor scale(const at::Tensor& x, double a) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("peer::scale", "").typed<decltype(scale_cpu)>();
  return op.call(x, a);
}

struct Scale : torch::autograd::Function<Scale> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, double a) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->saved_data["a"] = a;
    return scale(x, a);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    return {scale(grads[0], ctx->saved_data["a"].toDouble()), at::Tensor()};
  }
};

at::Tensor scale_autograd(const at::Tensor& x, double a) {
  return Scale::apply(x, a);
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
  m.def("scale(Tensor x, float a) -> Tensor");
  m.def("scalar(Tensor x) -> Tensor");
  m.def("like(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(peer, CPU, m) {
  m.impl("allreduce", &allreduce_cpu);
  m.impl("scale_inplace", &scale_inplace_cpu);
  m.impl("scale", &scale_cpu);
  m.impl("scalar", &scalar_cpu);
  m.impl("like", &like_cpu);
}

TORCH_LIBRARY_IMPL(peer, Autograd, m) {
  m.impl("scale", &scale_autograd);
}
