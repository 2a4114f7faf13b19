torch::Tensor rms_norm(torch::Tensor x, torch::Tensor w, double eps);
