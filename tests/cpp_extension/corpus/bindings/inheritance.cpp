#include <torch/extension.h>
#include <memory>

struct Layer {
    virtual ~Layer() = default;
    virtual torch::Tensor forward(torch::Tensor x) = 0;
    virtual std::string name() const { return "Layer"; }
};
struct Scale : Layer {
    explicit Scale(double by) : by(by) {}
    torch::Tensor forward(torch::Tensor x) override { return x * by; }
    std::string name() const override { return "Scale"; }
    double by;
};
struct Bias : Layer {
    explicit Bias(torch::Tensor b) : b(std::move(b)) {}
    torch::Tensor forward(torch::Tensor x) override { return x + b; }
    torch::Tensor b;
};

torch::Tensor run(const std::vector<std::shared_ptr<Layer>>& layers, torch::Tensor x) {
    for (const auto& layer : layers) x = layer->forward(x);
    return x;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    py::class_<Layer, std::shared_ptr<Layer>>(m, "Layer").def("forward", &Layer::forward).def("name", &Layer::name);
    py::class_<Scale, Layer, std::shared_ptr<Scale>>(m, "Scale").def(py::init<double>()).def_readwrite("by", &Scale::by);
    py::class_<Bias, Layer, std::shared_ptr<Bias>>(m, "Bias").def(py::init<torch::Tensor>());
    m.def("run", &run);
}
