/*
 * Run a model that calls ops of opjit, without Python: run MODEL.pt2, with a model of one tensor from package.py.
 */
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <iostream>

int main(int, char **words)
{
    torch::inductor::AOTIModelPackageLoader model(words[1]);
    std::cout << model.run({torch::arange(4.0)})[0] << std::endl;
}
