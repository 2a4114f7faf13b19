#include <torch/types.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <cmath>

__global__ void attention_kernel(const float* Q, const float* K, const float* V, float* O, int N, int d, float scale) {
    int row = blockIdx.x * blockDim.x + threadIdx.x, batch = blockIdx.y;
    if (row >= N) return;
    Q += batch * N * d; K += batch * N * d; V += batch * N * d; O += batch * N * d;
    float m = -INFINITY, l = 0.f;
    for (int j = 0; j < N; ++j) {
        float s = 0.f;
        for (int c = 0; c < d; ++c) s += Q[row * d + c] * K[j * d + c];
        s *= scale;
        float next = fmaxf(m, s), a = expf(m - next), b = expf(s - next);
        for (int c = 0; c < d; ++c) O[row * d + c] = O[row * d + c] * a + b * V[j * d + c];
        l = l * a + b;
        m = next;
    }
    for (int c = 0; c < d; ++c) O[row * d + c] /= l;
}

torch::Tensor attention(torch::Tensor q, torch::Tensor k, torch::Tensor v) {
    TORCH_CHECK(q.sizes() == k.sizes() && k.sizes() == v.sizes(), "q, k and v must have one shape");
    auto o = torch::zeros_like(q);
    torch::Device device(torch::kCUDA);
    const int N = q.size(1);
    attention_kernel<<<dim3((N + 31) / 32, q.size(0)), 32>>>(q.data_ptr<float>(), k.data_ptr<float>(), v.data_ptr<float>(), o.to(device).data_ptr<float>(), N, q.size(2), 1.0f / std::sqrt(float(q.size(2))));
    return o;
}
