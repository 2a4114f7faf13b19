#include <torch/extension.h>

std::vector<torch::Tensor> forms(torch::Tensor x) {
    auto a = torch::zeros({2}, torch::dtype(torch::kInt32).device(torch::kCPU));
    auto b = torch::zeros({2}, torch::TensorOptions().dtype(torch::kFloat64).device(x.device()).layout(torch::kStrided));
    auto c = torch::zeros({2}, x.options().dtype(torch::kUInt8));
    auto d = torch::ones({2}, torch::TensorOptions(torch::kHalf));
    auto e = torch::ones({2}, torch::TensorOptions().requires_grad(true));
    auto f = torch::ones({2}, torch::requires_grad());
    auto g = torch::ones({2}, torch::device(torch::Device(torch::kCPU, -1)));
    auto h = torch::ones({2}, at::device(at::kCPU).dtype(at::kBFloat16));
    auto i = torch::ones({2}, x.options().requires_grad(false));
    auto j = torch::ones({2, 3, 4, 5}, torch::TensorOptions().memory_format(at::MemoryFormat::ChannelsLast));
    auto k = torch::ones({2}, caffe2::TypeMeta::Make<double>());
    auto l = torch::zeros({1}, torch::dtype<int16_t>());
    return {a, b, c, d, e, f, g, h, i, k, l};
}
bool same_options(torch::Tensor a, torch::Tensor b) {
    return a.options().type_equal(b.options()) && a.options().dtype() == b.options().dtype() && a.options().device() == b.options().device();
}
std::string describe(torch::Tensor x) { return std::string(toString(x.scalar_type())) + " " + x.device().str() + " " + c10::str(x.options().dtype().name()); }
