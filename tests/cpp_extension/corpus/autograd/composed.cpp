#include <torch/extension.h>

torch::Tensor composed(torch::Tensor x, torch::Tensor w) { return torch::relu(x.mm(w)).sum(1) * 2; }
torch::Tensor normalized(torch::Tensor x) { return (x - x.mean()) / (x.std() + 1e-5); }
torch::Tensor in_place(torch::Tensor x) {
    auto y = x.clone();
    y.mul_(2);
    y.index_put_({0}, torch::zeros_like(y[0]));
    y += x;
    return y;
}
torch::Tensor through_data(torch::Tensor x) {
    auto y = torch::empty_like(x);
    for (int64_t i = 0; i < x.numel(); ++i) y.data_ptr<float>()[i] = x.data_ptr<float>()[i] * 2;
    return y;
}
std::vector<torch::Tensor> many(torch::Tensor x) { return {x * 2, x.detach() * 3, x.sum(), x > 0, x[0], x.t()}; }
torch::Tensor same(torch::Tensor x) { return x; }
