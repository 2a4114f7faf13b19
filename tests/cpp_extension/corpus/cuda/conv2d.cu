#include <torch/extension.h>

__global__ void conv_kernel(const float* x, const float* w, const float* bias, float* y, int C, int H, int W, int F, int R, int OH, int OW, int total) {
    int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= total) return;
    int ow = index % OW, oh = index / OW % OH, f = index / (OW * OH) % F, n = index / (OW * OH * F);
    float acc = bias ? bias[f] : 0.f;
    for (int c = 0; c < C; ++c)
        for (int r = 0; r < R; ++r)
            for (int s = 0; s < R; ++s) acc += x[((n * C + c) * H + oh + r) * W + ow + s] * w[((f * C + c) * R + r) * R + s];
    y[index] = acc;
}

torch::Tensor conv2d_cuda(torch::Tensor x, torch::Tensor w, c10::optional<torch::Tensor> bias) {
    TORCH_CHECK(x.dim() == 4, "x must be 4D");
    const int N = x.size(0), C = x.size(1), H = x.size(2), W = x.size(3), F = w.size(0), R = w.size(2);
    auto y = torch::empty({N, F, H - R + 1, W - R + 1}, x.options());
    const float* b = bias.has_value() ? bias->data_ptr<float>() : nullptr;
    const int total = y.numel();
    conv_kernel<<<(total + 255) / 256, 256>>>(x.data_ptr<float>(), w.data_ptr<float>(), b, y.data_ptr<float>(), C, H, W, F, R, H - R + 1, W - R + 1, total);
    return y;
}
