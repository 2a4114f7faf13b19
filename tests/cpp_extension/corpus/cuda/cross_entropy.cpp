torch::Tensor cross_entropy(torch::Tensor logits, torch::Tensor target);
