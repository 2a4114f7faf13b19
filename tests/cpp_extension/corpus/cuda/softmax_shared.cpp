torch::Tensor softmax_cuda(torch::Tensor x);
