torch::Tensor square_matrix(torch::Tensor matrix);
