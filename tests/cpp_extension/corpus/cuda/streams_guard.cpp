torch::Tensor fill(torch::Tensor x, float value);
