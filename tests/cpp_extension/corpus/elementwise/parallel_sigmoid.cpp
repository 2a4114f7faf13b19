#include <torch/extension.h>
#include <ATen/Parallel.h>

torch::Tensor sigmoid_parallel(torch::Tensor x) {
    x = x.contiguous();
    auto out = torch::empty_like(x);
    const float* in = x.data_ptr<float>();
    float* o = out.data_ptr<float>();
    at::parallel_for(0, x.numel(), 16, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) o[i] = 1.0f / (1.0f + std::exp(-in[i]));
    });
    return out;
}

torch::Tensor fails_inside(torch::Tensor x) {
    at::parallel_for(0, x.numel(), 2, [&](int64_t begin, int64_t end) {
        TORCH_CHECK(end < 0, "a task failed");
    });
    return x;
}
