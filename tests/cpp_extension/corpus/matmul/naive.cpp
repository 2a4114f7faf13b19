#include <torch/extension.h>

torch::Tensor matmul_naive(torch::Tensor A, torch::Tensor B) {
    int M = A.size(0);
    int K = A.size(1);
    int N = B.size(1);
    TORCH_CHECK(K == B.size(0), "Incompatible dimensions: ", K, " and ", B.size(0));
    auto C = torch::zeros({M, N}, A.options());
    auto a = A.accessor<float, 2>();
    auto b = B.accessor<float, 2>();
    auto c = C.accessor<float, 2>();
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++)
            for (int k = 0; k < K; k++) c[i][j] += a[i][k] * b[k][j];
    return C;
}
