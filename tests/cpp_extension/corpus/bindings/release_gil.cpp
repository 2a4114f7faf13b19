#include <torch/extension.h>

torch::Tensor slow_sum(torch::Tensor x) {
    double total = 0;
    auto c = x.to(torch::kDouble).contiguous();
    for (int64_t i = 0; i < c.numel(); ++i) total += c.data_ptr<double>()[i];
    return torch::tensor(total);
}
bool has_gil() { return PyGILState_Check() == 1; }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("slow_sum", &slow_sum, py::call_guard<py::gil_scoped_release>());
    m.def("released", &has_gil, py::call_guard<py::gil_scoped_release>());
    m.def("held", &has_gil);
    m.def("wrapped", torch::wrap_pybind_function(has_gil));
    m.def("wrapped_no_gil", torch::wrap_pybind_function_no_gil(has_gil));
    m.def("scoped", [](torch::Tensor x) {
        py::gil_scoped_release release;
        auto y = x * 2;
        py::gil_scoped_acquire acquire;
        return y;
    });
    m.def("fails", [](torch::Tensor x) { TORCH_CHECK(false, "without the GIL"); return x; }, py::call_guard<py::gil_scoped_release>());
}
