#include <torch/extension.h>

struct Welford {
    double mean = 0, m2 = 0;
    int64_t n = 0;
    void push(double v) {
        ++n;
        double d = v - mean;
        mean += d / n;
        m2 += d * (v - mean);
    }
};

std::tuple<double, double, int64_t> welford(const at::Tensor& x) {
    Welford state;
    auto flat = x.to(at::kDouble).contiguous().view({-1});
    for (int64_t i = 0; i < flat.numel(); i++) state.push(flat[i].item<double>());
    return std::make_tuple(state.mean, state.n ? state.m2 / state.n : 0.0, state.n);
}
