#include <torch/extension.h>

namespace ops {
torch::Tensor square(const torch::Tensor& x) { return x * x; }
namespace detail {
torch::Tensor cube(const torch::Tensor& x) { return x * x * x; }
}
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    auto sub = m.def_submodule("ops", "more functions");
    sub.def("square", &ops::square);
    sub.def("cube", &ops::detail::cube);
    m.def("square_plus", [](torch::Tensor x, torch::Tensor y) { return ops::square(x) + y; }, "x^2 + y", py::arg("x"), py::arg("y"));
}
