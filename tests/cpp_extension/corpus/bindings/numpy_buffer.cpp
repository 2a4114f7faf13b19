#include <torch/extension.h>
#include <pybind11/stl.h>
#include <pybind11/numpy.h>

torch::Tensor from_array(py::array_t<float, py::array::c_style | py::array::forcecast> a) {
    std::vector<int64_t> shape(a.shape(), a.shape() + a.ndim());
    return torch::from_blob(const_cast<float*>(a.data()), shape, torch::kFloat32).clone();
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("from_array", &from_array);
    m.def("strings", [](std::map<std::string, std::vector<int>> d) { return d.size(); });
}
