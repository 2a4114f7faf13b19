#include <torch/extension.h>

at::Tensor batched(const at::Tensor& A, const at::Tensor& B) {
    TORCH_CHECK(A.dim() == 3, "A must be 3D");
    TORCH_CHECK(B.dim() == 3, "B must be 3D");
    TORCH_CHECK(A.size(0) == B.size(0), "Batch sizes must match");
    TORCH_CHECK(A.size(2) == B.size(1), "Inner dimensions (K) must match");
    auto options = torch::TensorOptions().dtype(A.dtype()).device(A.device());
    auto C = torch::zeros({A.size(0), A.size(1), B.size(2)}, options);
    for (int64_t i = 0; i < A.size(0); ++i) C[i] = A[i].mm(B[i]);
    return C;
}
