torch::Tensor gelu(torch::Tensor x);
