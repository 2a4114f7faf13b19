torch::Tensor scale(torch::Tensor x, float s);
