#include <torch/extension.h>

__global__ void histogram_kernel(const int64_t* x, int* counts, int n, int bins) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        int64_t b = x[i];
        if (b >= 0 && b < bins) atomicAdd(counts + b, 1);
    }
}

torch::Tensor histogram(torch::Tensor x, int64_t bins) {
    TORCH_CHECK_TYPE(x.scalar_type() == at::kLong, "histogram wants int64");
    auto counts = torch::zeros({bins}, x.options().dtype(torch::kInt32));
    histogram_kernel<<<4, 64>>>(x.contiguous().data_ptr<int64_t>(), counts.data_ptr<int>(), x.numel(), bins);
    return counts;
}
