#include <torch/extension.h>

torch::Tensor add(torch::Tensor a, torch::Tensor b) { return a + b; }
torch::Tensor add_number(torch::Tensor a, double b) { return a + b; }
int64_t mul(int64_t a, int64_t b) { return a * b; }
double mul(double a, double b) { return a * b; }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("add", &add, "two tensors");
    m.def("add", &add_number, "a tensor and a number");
    m.def("add", [](std::string a, std::string b) { return a + b; });
    m.def("mul", py::overload_cast<int64_t, int64_t>(&mul));
    m.def("mul", static_cast<double (*)(double, double)>(&mul));
}
