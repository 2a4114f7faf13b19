#include <torch/extension.h>
#include <limits>

torch::Tensor max_pool2d(torch::Tensor x, int64_t k) {
    auto in = x.contiguous();
    int64_t H = in.size(2) / k, W = in.size(3) / k;
    auto out = torch::full({in.size(0), in.size(1), H, W}, -std::numeric_limits<float>::infinity(), in.options());
    auto a = in.accessor<float, 4>();
    auto o = out.accessor<float, 4>();
    for (int n = 0; n < in.size(0); n++)
        for (int c = 0; c < in.size(1); c++)
            for (int i = 0; i < H * k; i++)
                for (int j = 0; j < W * k; j++) o[n][c][i / k][j / k] = std::max(o[n][c][i / k][j / k], a[n][c][i][j]);
    return out;
}
torch::Tensor pools(torch::Tensor x) { return at::max_pool2d(x, {3, 3}, {2, 2}, {1, 1}) + at::avg_pool2d(x, {3, 3}, {2, 2}, {1, 1}); }
torch::Tensor adaptive(torch::Tensor x) { return at::adaptive_avg_pool2d(x, {2, 3}); }
torch::Tensor global_avg(torch::Tensor x) { return x.mean({2, 3}); }
