#include <torch/extension.h>

torch::Tensor arithmetic(torch::Tensor a, torch::Tensor b) {
    auto c = a + b * 2 - 1.5;
    c = 3 - c;
    c = 2.0 * c / 4;
    c = 1 / (c + 10.0);
    return -c + a / b - (b - a) * a;
}

torch::Tensor in_place(torch::Tensor a, torch::Tensor b) {
    auto c = a.clone();
    c += b;
    c *= 2;
    c -= 0.5;
    c /= b;
    c += 1;
    return c;
}

std::vector<torch::Tensor> compare(torch::Tensor a, torch::Tensor b) {
    return {a < b, a <= b, a > 0, a >= 0.5, a == b, a != 0, (a > 0) & (b > 0), (a > 0) | (b > 0), ~(a > 0)};
}

torch::Tensor modulo(torch::Tensor a, torch::Tensor b) { return torch::remainder(a, b) + torch::fmod(a, 3); }
