#include <torch/extension.h>

torch::Tensor conv2d(torch::Tensor x, torch::Tensor w, c10::optional<torch::Tensor> bias, int stride = 1, int padding = 0) {
    TORCH_CHECK(x.dim() == 4 && w.dim() == 4, "expected 4D input and weight");
    TORCH_CHECK(x.size(1) == w.size(1), "channel mismatch: ", x.size(1), " != ", w.size(1));
    const int64_t N = x.size(0), C = x.size(1), H = x.size(2), W = x.size(3), F = w.size(0), R = w.size(2), S = w.size(3);
    const int64_t OH = (H + 2 * padding - R) / stride + 1, OW = (W + 2 * padding - S) / stride + 1;
    auto out = torch::zeros({N, F, OH, OW}, x.options());
    auto xa = x.accessor<float, 4>();
    auto wa = w.accessor<float, 4>();
    auto oa = out.accessor<float, 4>();
    for (int64_t n = 0; n < N; n++)
        for (int64_t f = 0; f < F; f++)
            for (int64_t i = 0; i < OH; i++)
                for (int64_t j = 0; j < OW; j++) {
                    float acc = bias.has_value() ? bias.value().data_ptr<float>()[f] : 0.f;
                    for (int64_t c = 0; c < C; c++)
                        for (int64_t r = 0; r < R; r++)
                            for (int64_t s = 0; s < S; s++) {
                                int64_t h = i * stride - padding + r, v = j * stride - padding + s;
                                if (h >= 0 && h < H && v >= 0 && v < W) acc += xa[n][c][h][v] * wa[f][c][r][s];
                            }
                    oa[n][f][i][j] = acc;
                }
    return out;
}
