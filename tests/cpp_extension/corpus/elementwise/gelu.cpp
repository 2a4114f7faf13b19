#include <torch/extension.h>
#include <cmath>

torch::Tensor gelu(torch::Tensor input) {
    TORCH_CHECK(input.is_contiguous(), "input must be contiguous");
    TORCH_CHECK(input.dtype() == torch::kFloat32, "input must be float32, got ", input.dtype());
    auto output = torch::zeros_like(input);
    const float* in = input.data_ptr<float>();
    float* out = output.data_ptr<float>();
    const float kAlpha = 0.7978845608028654f;
    for (int i = 0; i < input.numel(); ++i) {
        float v = in[i];
        out[i] = 0.5f * v * (1.0f + std::tanh(kAlpha * (v + 0.044715f * v * v * v)));
    }
    return output;
}
