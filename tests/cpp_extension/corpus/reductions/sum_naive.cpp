#include <torch/extension.h>

double sum_all(torch::Tensor x) {
    double total = 0;
    auto c = x.contiguous();
    auto p = c.data_ptr<float>();
    for (int64_t i = 0; i < c.numel(); i++) total += p[i];
    return total;
}

torch::Tensor sum_rows(torch::Tensor x) {
    TORCH_CHECK(x.dim() == 2, "Expected a 2D tensor, got ", x.dim(), "D");
    auto out = torch::zeros({x.size(0)}, x.options());
    auto a = x.accessor<float, 2>();
    auto o = out.accessor<float, 1>();
    for (int i = 0; i < x.size(0); i++) {
        float acc = 0.f;
        for (int j = 0; j < x.size(1); j++) acc += a[i][j];
        o[i] = acc;
    }
    return out;
}
