torch::Tensor sum_cuda(torch::Tensor x);
