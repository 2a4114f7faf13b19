#include <torch/extension.h>

at::Tensor twice(const at::Tensor& x) { return x * 2; }
TORCH_LIBRARY(corpus_with_module, m) { m.def("twice", twice); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("direct", &twice);
    m.def("dispatched", [](const at::Tensor& x) {
        return c10::Dispatcher::singleton().findSchemaOrThrow("corpus_with_module::twice", "").typed<at::Tensor(const at::Tensor&)>().call(x);
    });
}
