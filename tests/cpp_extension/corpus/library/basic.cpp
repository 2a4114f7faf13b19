#include <torch/extension.h>

at::Tensor myadd(const at::Tensor& a, const at::Tensor& b) {
    TORCH_CHECK(a.sizes() == b.sizes(), "sizes differ");
    return a + b;
}
at::Tensor scale(at::Tensor x, double s) { return x * s; }
std::tuple<at::Tensor, int64_t> both(at::Tensor x, c10::optional<at::Tensor> y) { return {y ? x + *y : x, x.numel()}; }

TORCH_LIBRARY(corpus_basic, m) {
    m.def("myadd(Tensor a, Tensor b) -> Tensor", &myadd);
    m.def("scale(Tensor x, float s=2.0) -> Tensor", &scale);
    m.def("both", &both);
}
