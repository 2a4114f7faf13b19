torch::Tensor blur(torch::Tensor x, std::vector<double> weights);
