#include <torch/extension.h>
#include <optional>
#include <variant>

namespace config {
enum class Activation : int { None = 0, Relu = 1, Tanh = 2 };
struct Options {
    Activation activation = Activation::None;
    std::optional<double> scale;
    bool transpose{false};
};
}  // namespace config

torch::Tensor run(torch::Tensor x, int activation, std::optional<double> scale, bool transpose) {
    config::Options o{static_cast<config::Activation>(activation), scale, transpose};
    if (o.transpose) x = x.t();
    if (o.scale) x = x * *o.scale;
    switch (o.activation) {
        case config::Activation::None: return x;
        case config::Activation::Relu: return x.relu();
        case config::Activation::Tanh: return x.tanh();
        default: TORCH_CHECK(false, "unknown activation ", activation);
    }
}
std::variant<int64_t, std::string> either(bool number) {
    if (number) return int64_t(4);
    return std::string("four");
}
std::string visit(std::variant<int64_t, std::string> v) { return std::holds_alternative<int64_t>(v) ? "int" : "str"; }
