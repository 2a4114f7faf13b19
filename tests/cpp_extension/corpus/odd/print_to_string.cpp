#include <torch/extension.h>
#include <sstream>
#include <iomanip>

std::string printed(torch::Tensor x) {
    std::ostringstream s;
    s << x;
    return s.str();
}
std::string formatted(torch::Tensor x) {
    std::stringstream s;
    s << std::fixed << std::setprecision(3);
    for (int64_t i = 0; i < x.numel(); ++i) s << (i ? ", " : "") << x.flatten()[i].item<float>();
    return s.str();
}
std::string joined(torch::Tensor x) { return c10::str("dim=", x.dim(), " type=", x.scalar_type(), " sizes=", x.sizes()); }
std::string scalar(at::Scalar v) { std::ostringstream s; s << v; return s.str(); }
