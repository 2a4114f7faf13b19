torch::Tensor copy_vectorized(torch::Tensor x);
