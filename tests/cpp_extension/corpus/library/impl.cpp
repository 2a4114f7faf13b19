#include <torch/library.h>
#include <ATen/ATen.h>

at::Tensor relu_cpu(const at::Tensor& x) { return x.clamp_min(0); }
at::Tensor relu_meta(const at::Tensor& x) { return at::empty_like(x); }
void fill_(at::Tensor& x, const at::Scalar& v) { x.fill_(v); }
std::vector<at::Tensor> split(const at::Tensor& x, int64_t n) { return x.chunk(n); }

TORCH_LIBRARY(corpus_impl, m) {
    m.def("relu(Tensor x) -> Tensor");
    m.def("fill_(Tensor(a!) x, Scalar v) -> ()");
    m.def("split(Tensor x, int n) -> Tensor[]");
}
TORCH_LIBRARY_IMPL(corpus_impl, CPU, m) {
    m.impl("relu", relu_cpu);
    m.impl("fill_", fill_);
    m.impl("split", TORCH_FN(split));
}
TORCH_LIBRARY_IMPL(corpus_impl, Meta, m) { m.impl("relu", &relu_meta); }
