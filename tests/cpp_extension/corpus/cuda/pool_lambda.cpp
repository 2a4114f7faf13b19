torch::Tensor max_pool1d(torch::Tensor x, int kernel, int stride);
