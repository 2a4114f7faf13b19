torch::Tensor cumsum_cuda(torch::Tensor x);
