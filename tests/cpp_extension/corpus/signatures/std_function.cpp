#include <torch/extension.h>
#include <pybind11/functional.h>
#include <functional>

torch::Tensor apply(torch::Tensor x, std::function<torch::Tensor(torch::Tensor)> f, int times) {
    for (int i = 0; i < times; ++i) x = f(x);
    return x;
}
std::function<double(double)> adder(double a) {
    return [a](double b) { return a + b; };
}
double integrate(const std::function<double(double)>& f, double lo, double hi, int n) {
    double total = 0, h = (hi - lo) / n;
    for (int i = 0; i < n; ++i) total += f(lo + (i + 0.5) * h) * h;
    return total;
}
