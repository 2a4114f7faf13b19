torch::Tensor attention(torch::Tensor q, torch::Tensor k, torch::Tensor v);
