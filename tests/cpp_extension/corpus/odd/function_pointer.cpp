#include <torch/extension.h>

typedef float (*unary_fn)(float);
static float square(float v) { return v * v; }
static float twice(float v) { return v + v; }

static torch::Tensor map(const torch::Tensor& x, unary_fn f) {
    auto out = torch::empty(x.sizes(), torch::kFloat32);
    auto in = x.contiguous();
    std::transform(in.data_ptr<float>(), in.data_ptr<float>() + in.numel(), out.data_ptr<float>(), f);
    return out;
}
torch::Tensor choose(torch::Tensor x, const std::string& which) {
    static const std::pair<const char*, unary_fn> fns[] = {{"square", square}, {"twice", twice}};
    for (auto [name, f] : fns)
        if (which == name) return map(x, f);
    throw std::invalid_argument("no function " + which);
}
