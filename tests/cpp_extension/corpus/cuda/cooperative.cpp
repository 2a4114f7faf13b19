torch::Tensor block_sums(torch::Tensor x);
