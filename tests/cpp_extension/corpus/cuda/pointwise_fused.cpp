torch::Tensor fused(torch::Tensor x, torch::Tensor bias, double scale, bool use_relu);
std::tuple<torch::Tensor, torch::Tensor> backward(torch::Tensor grad, torch::Tensor y);
