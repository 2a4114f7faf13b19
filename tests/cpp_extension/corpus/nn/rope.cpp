#include <torch/extension.h>
using namespace torch::indexing;

torch::Tensor rope(torch::Tensor x, double base) {
    auto d = x.size(-1) / 2;
    auto inv = 1.0 / torch::pow(base, torch::arange(0, d, x.options()) / d);
    auto angle = torch::outer(torch::arange(x.size(-2), x.options()), inv);
    auto a = x.index({"...", Slice(None, d)}), b = x.index({Ellipsis, Slice(d, 2 * d)});
    auto c = angle.cos(), s = angle.sin();
    return torch::cat({a * c - b * s, a * s + b * c}, -1);
}
