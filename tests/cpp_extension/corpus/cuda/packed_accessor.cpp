torch::Tensor transpose_cuda(torch::Tensor x);
