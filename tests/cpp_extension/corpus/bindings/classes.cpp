#include <torch/extension.h>

class Counter {
public:
    explicit Counter(torch::Tensor start, int64_t step = 1) : value_(start.clone()), step_(step) { TORCH_CHECK(step != 0, "step must not be 0"); }
    void increment(int64_t times) { value_ += times * step_; }
    torch::Tensor value() const { return value_; }
    int64_t step() const { return step_; }
    void set_step(int64_t s) { step_ = s; }
    bool operator==(const Counter& other) const { return torch::equal(value_, other.value_); }
    static Counter zero() { return Counter(torch::zeros({1})); }
    double public_field = 0.5;

private:
    torch::Tensor value_;
    int64_t step_;
};

enum class Mode { Fast = 1, Exact = 2 };

torch::Tensor run(Counter& c, Mode mode) { return mode == Mode::Fast ? c.value() : c.value().to(torch::kDouble); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    py::class_<Counter>(m, "Counter", "Counts")
        .def(py::init<torch::Tensor, int64_t>(), py::arg("start"), py::arg("step") = 1)
        .def("increment", &Counter::increment, py::arg("times") = 1)
        .def("value", &Counter::value)
        .def_property("step", &Counter::step, &Counter::set_step)
        .def_property_readonly("fixed", &Counter::step)
        .def_readwrite("public_field", &Counter::public_field)
        .def_static("zero", &Counter::zero)
        .def("__eq__", &Counter::operator==)
        .def("__len__", [](const Counter& c) { return c.value().numel(); })
        .def("__repr__", [](const Counter& c) { return "Counter(" + std::to_string(c.step()) + ")"; });
    py::enum_<Mode>(m, "Mode").value("Fast", Mode::Fast).value("Exact", Mode::Exact).export_values();
    m.def("run", &run, py::arg("c"), py::arg("mode") = Mode::Fast);
}
