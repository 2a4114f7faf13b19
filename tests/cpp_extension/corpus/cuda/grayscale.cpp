torch::Tensor rgb_to_grayscale(torch::Tensor image);
