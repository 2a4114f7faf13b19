#include <torch/extension.h>

torch::Tensor add(torch::Tensor x, double a, int64_t b, bool c) {
    at::Scalar s(a), t(b), u = c;
    return torch::add(x, s) * t + u;
}
std::vector<torch::Tensor> ops(torch::Tensor x) {
    c10::Scalar two = 2, half(0.5);
    return {x + two, half * x, x / half, x.pow(two), torch::clamp(x, -half, two), x > two, x.eq(half), at::full({2}, half), torch::add(x, x, half), x.fill_(two)};
}
std::string kinds(double a, int64_t b, bool c) {
    std::string out;
    for (const at::Scalar& s : {at::Scalar(a), at::Scalar(b), at::Scalar(c), at::Scalar(c10::complex<double>(a, 1))})
        out += std::string(toString(s.type())) + (s.isIntegral(false) ? "i" : s.isFloatingPoint() ? "f" : s.isBoolean() ? "b" : s.isComplex() ? "c" : "?");
    return out;
}
double to_double(int64_t b) { return at::Scalar(b).to<double>(); }
int to_int(double a) { return at::Scalar(a).toInt(); }
uint8_t to_byte(int64_t b) { return at::Scalar(b).to<uint8_t>(); }
bool equal(double a, double b) { return at::Scalar(a).equal(b) && at::Scalar(a).toDouble() == b; }
