#include <torch/extension.h>
#include <vector>
#include <cmath>

torch::Tensor softmax_forward(torch::Tensor input) {
    TORCH_CHECK(input.dim() == 2, "input must be 2D (batch_size, dim)");
    auto x = input.contiguous();
    auto output = torch::empty_like(x);
    int batch = x.size(0), dim = x.size(1);
    for (int b = 0; b < batch; b++) {
        const float* row = x.data_ptr<float>() + b * dim;
        float* out = output.data_ptr<float>() + b * dim;
        float max_val = -INFINITY;
        for (int i = 0; i < dim; i++) max_val = fmaxf(max_val, row[i]);
        float sum = 0.0f;
        for (int i = 0; i < dim; i++) { out[i] = expf(row[i] - max_val); sum += out[i]; }
        for (int i = 0; i < dim; i++) out[i] /= sum;
    }
    return output;
}

torch::Tensor softmax_aten(torch::Tensor x, int64_t dim, std::optional<at::ScalarType> dtype) { return torch::softmax(x, dim, dtype); }
torch::Tensor log_softmax(torch::Tensor x) { return x.log_softmax(-1); }
