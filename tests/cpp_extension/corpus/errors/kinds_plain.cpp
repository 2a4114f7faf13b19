#include <torch/extension.h>
#include <stdexcept>

int raise(int kind) {
    if (kind == 0) TORCH_CHECK(false, "a check without the wrapper");
    if (kind == 1) TORCH_CHECK_VALUE(false, "a value");
    if (kind == 2) TORCH_CHECK_INDEX(false, "an index");
    if (kind == 3) throw std::runtime_error("runtime");
    if (kind == 4) throw std::invalid_argument("argument");
    if (kind == 5) throw std::out_of_range("range");
    if (kind == 6) TORCH_CHECK_TYPE(false, "a type");
    if (kind == 7) TORCH_CHECK_NOT_IMPLEMENTED(false, "not yet");
    if (kind == 8) throw 3;
    return kind;
}
torch::Tensor bad_shapes(torch::Tensor a, torch::Tensor b) { return a.mm(b); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("raise", &raise);
    m.def("bad_shapes", &bad_shapes, "raises for bad shapes");
}
