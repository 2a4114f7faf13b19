#include <torch/extension.h>
#include <algorithm>

#define TILE_SIZE 4
#define CHECK_CONTIGUOUS(x) TORCH_CHECK(x.is_contiguous(), #x " must be contiguous")
#define CHECK_FLOAT(x) TORCH_CHECK(x.scalar_type() == torch::kFloat32, #x " must be a float32 tensor")
#define CHECK_INPUT(x) CHECK_CONTIGUOUS(x); CHECK_FLOAT(x)

static void tile(const float* a, const float* b, float* c, int M, int N, int K, int i0, int j0, int k0) {
    for (int i = i0; i < std::min(i0 + TILE_SIZE, M); ++i)
        for (int k = k0; k < std::min(k0 + TILE_SIZE, K); ++k)
            for (int j = j0; j < std::min(j0 + TILE_SIZE, N); ++j) c[i * N + j] += a[i * K + k] * b[k * N + j];
}

torch::Tensor matmul_tiled(torch::Tensor a, torch::Tensor b) {
    CHECK_INPUT(a);
    CHECK_INPUT(b);
    const int M = a.size(0), K = a.size(1), N = b.size(1);
    auto c = torch::zeros({M, N}, a.options());
    for (int i = 0; i < M; i += TILE_SIZE)
        for (int j = 0; j < N; j += TILE_SIZE)
            for (int k = 0; k < K; k += TILE_SIZE)
                tile(a.data_ptr<float>(), b.data_ptr<float>(), c.data_ptr<float>(), M, N, K, i, j, k);
    return c;
}
