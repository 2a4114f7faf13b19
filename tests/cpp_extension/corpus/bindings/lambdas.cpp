#include <torch/extension.h>

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.attr("x") = 3;
    m.attr("name") = "lambdas";
    m.attr("pi") = 3.25;
    m.def("twice", [](const torch::Tensor& x) { return x * 2; });
    m.def("sum", [](torch::Tensor x) { return x.sum().item<double>(); }, "sum as a double");
    m.def("count", []() {
        static int calls = 0;
        return ++calls;
    });
    double captured = 1.5;
    m.def("plus", [captured](double v) { return v + captured; }, "adds what was captured");
    m.def("none", []() { return py::none(); });
}
