torch::Tensor add_half2(torch::Tensor a, torch::Tensor b);
