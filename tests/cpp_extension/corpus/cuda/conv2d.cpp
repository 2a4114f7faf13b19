torch::Tensor conv2d_cuda(torch::Tensor x, torch::Tensor w, c10::optional<torch::Tensor> bias);
