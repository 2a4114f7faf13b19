#include <torch/extension.h>

torch::Tensor scaled(torch::Tensor x, double scale, int64_t times, bool negate, std::string mode) {
    TORCH_CHECK(mode == "add" || mode == "mul", "unknown mode: ", mode);
    for (int64_t i = 0; i < times; ++i) x = mode == "add" ? x + scale : x * scale;
    return negate ? -x : x;
}
torch::Tensor biased(torch::Tensor x, c10::optional<torch::Tensor> bias) { return bias ? x + *bias : x; }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.doc() = "Defaults";
    m.def("scaled", &scaled, "Scale a tensor", py::arg("x"), py::arg("scale") = 2.0, py::arg("times") = 1, py::arg("negate") = false, py::arg("mode") = "mul");
    m.def("biased", &biased, py::arg("x"), py::arg("bias") = py::none());
    m.def("shape", [](std::vector<int64_t> s) { return torch::zeros(s); }, py::arg("s") = std::vector<int64_t>{2, 1});
    m.def("keyword_only", [](torch::Tensor x, double a) { return x * a; }, py::arg("x"), py::kw_only(), py::arg("a"));
    m.def("not_none", [](torch::Tensor x) { return x; }, py::arg("x").none(false));
    m.def("exact", [](double d) { return d; }, py::arg("d").noconvert());
}
