torch::Tensor matmul_tiled(torch::Tensor A, torch::Tensor B);
