torch::Tensor histogram(torch::Tensor x, int64_t bins);
