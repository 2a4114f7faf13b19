#include <torch/extension.h>

torch::Tensor relu_forward(torch::Tensor x) {
    auto out = torch::empty_like(x);
    auto x_data = x.data_ptr<float>();
    auto out_data = out.data_ptr<float>();
    int64_t n = x.numel();
    for (int64_t i = 0; i < n; i++) {
        out_data[i] = x_data[i] > 0 ? x_data[i] : 0;
    }
    return out;
}
