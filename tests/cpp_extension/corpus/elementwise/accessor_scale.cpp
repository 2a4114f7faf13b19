#include <torch/extension.h>

torch::Tensor scale_rows(torch::Tensor x, torch::Tensor w) {
    auto out = torch::zeros({x.size(0), x.size(1)}, torch::dtype(torch::kFloat32));
    auto xa = x.accessor<float, 2>();
    auto wa = w.accessor<float, 1>();
    auto oa = out.accessor<float, 2>();
    TORCH_CHECK_INDEX(w.size(0) >= x.size(0), "w has ", w.size(0), " entries for ", x.size(0), " rows");
    for (int64_t i = 0; i < xa.size(0); i++)
        for (int64_t j = 0; j < xa.size(1); j++)
            oa[i][j] = xa[i][j] * wa[i];
    return out;
}
