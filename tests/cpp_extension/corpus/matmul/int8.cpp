#include <torch/extension.h>
#include <cstdint>

torch::Tensor int8_matmul(torch::Tensor a, torch::Tensor b, float scale) {
    TORCH_CHECK(a.dtype() == torch::kInt8 && b.dtype() == torch::kInt8, "int8 inputs expected");
    auto out = torch::empty({a.size(0), b.size(1)}, torch::TensorOptions().dtype(torch::kFloat32));
    auto pa = a.accessor<int8_t, 2>();
    auto pb = b.accessor<int8_t, 2>();
    auto po = out.accessor<float, 2>();
    for (int64_t i = 0; i < a.size(0); i++)
        for (int64_t j = 0; j < b.size(1); j++) {
            int32_t acc = 0;
            for (int64_t k = 0; k < a.size(1); k++) acc += int32_t(pa[i][k]) * int32_t(pb[k][j]);
            po[i][j] = acc * scale;
        }
    return out;
}

std::tuple<torch::Tensor, float> quantize(torch::Tensor x) {
    float scale = x.abs().max().item<float>() / 127.f;
    return {(x / scale).round().clamp(-128, 127).to(torch::kInt8), scale};
}
