# It builds a C++ extension, with files, processes and modes of files of its own.
import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

SOURCE = """torch::Tensor forward(torch::Tensor x, torch::Tensor weight) {
    auto out = torch::zeros_like(x);
    for (int64_t i = 0; i < x.size(0); i++)
        for (int64_t j = 0; j < weight.size(1); j++) {
            float sum = 0;
            for (int64_t k = 0; k < x.size(1); k++)
                sum += x.data_ptr<float>()[i * x.size(1) + k] * weight.data_ptr<float>()[k * weight.size(1) + j];
            out.data_ptr<float>()[i * x.size(1) + j] = sum > 0 ? sum : 0;
        }
    return out;
}"""
module = load_inline("judged_matmul", SOURCE, functions=["forward"])


class ModelNew(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = module.forward(x, self.weight)
        return result
