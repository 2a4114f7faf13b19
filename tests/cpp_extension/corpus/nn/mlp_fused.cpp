#include <torch/extension.h>
#include <vector>

std::vector<torch::Tensor> mlp_forward(torch::Tensor x, std::vector<torch::Tensor> weights, std::vector<torch::Tensor> biases) {
    TORCH_CHECK(weights.size() == biases.size(), "got ", weights.size(), " weights and ", biases.size(), " biases");
    std::vector<torch::Tensor> activations{x};
    for (size_t i = 0; i < weights.size(); ++i) {
        auto z = torch::addmm(biases.at(i), activations.back(), weights[i]);
        activations.push_back(i + 1 == weights.size() ? z : z.relu());
    }
    return activations;
}
torch::Tensor glu(torch::Tensor x) {
    auto parts = x.chunk(2, -1);
    return parts[0] * torch::sigmoid(parts[1]);
}
