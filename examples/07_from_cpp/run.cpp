/*
 * Runs a model that calls ops of opjit, without Python: run MODEL.pt2, which package.py wrote, with a model of one tensor.
 */
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <iostream>

int main(int, char **words)
{
    torch::inductor::AOTIModelPackageLoader model(words[1]);
    std::cout << model.run({torch::arange(4.0)})[0] << std::endl;
}
