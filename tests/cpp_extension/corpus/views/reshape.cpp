#include <torch/extension.h>

std::vector<torch::Tensor> views(torch::Tensor x) {
    return {x.view({-1}), x.view({2, -1}), x.reshape({-1, 2}), x.flatten(), x.unsqueeze(0), x.unsqueeze(-1).squeeze(-1), x.t(), x.transpose(0, 1),
            x.permute({1, 0}), x.unsqueeze(1).expand({-1, 3, -1}), x.flatten(0, -1), torch::squeeze(x.unsqueeze(0)), x.view_as(x), x.mT(),
            x.expand({2, x.size(0), x.size(1)}), x.unflatten(1, {1, -1}), x.movedim(0, 1), x.swapaxes(0, 1), x.ravel(), x.alias()};
}
torch::Tensor bad_view(torch::Tensor x, std::vector<int64_t> shape) { return x.view(shape); }
torch::Tensor repeat(torch::Tensor x) { return x.repeat({2, 1}) + x.repeat_interleave(2, 0); }
torch::Tensor make_contiguous(torch::Tensor x) { return x.t().contiguous(); }
