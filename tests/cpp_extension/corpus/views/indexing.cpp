#include <torch/extension.h>
using namespace torch::indexing;

std::vector<torch::Tensor> reads(torch::Tensor x) {
    return {x[0], x[1][2], x.index({0}), x.index({Slice(), 0}), x.index({Slice(1, None), Slice(None, None, 2)}), x.index({"...", -1}),
            x.index({None, 0}), x.index({x > 0}), x.index({Ellipsis, torch::tensor({0, 2})}), x.index({torch::tensor({1, 0}), torch::tensor({2, 3})}),
            x.select(1, 2), x.slice(0, 1, 3), x.slice(1, 0, 5, 2), x.narrow(1, 1, 2), x.index({true}), x.index({Slice(-2), Slice(0, -1)})};
}
torch::Tensor writes(torch::Tensor x) {
    auto y = x.clone();
    y.index_put_({0, Slice()}, 1);
    y.index_put_({Slice(), 1}, torch::full({y.size(0)}, 2.0));
    y.index_put_({y < 0}, 0);
    y[2][3] = 7;
    y[1] = torch::zeros(y.size(1));
    y.select(1, 0).add_(10);
    y.slice(0, 2, 4).mul_(2);
    return y;
}
torch::Tensor at_index(torch::Tensor x, int64_t i) { return x[i]; }
torch::Tensor put(torch::Tensor x, torch::Tensor i, torch::Tensor v, bool accumulate) { return x.index_put({i}, v, accumulate); }
