/*
 * Run a model that calls ops of opjit, without Python: run OPS.so... MODEL.pt, with a TorchScript module of one tensor.
 */
#include <dlfcn.h>
#include <torch/script.h>

#include <iostream>

/* Define an op in torch with the library that `opjit get --build-directory` wrote. */
static void define(const char *path)
{
    void *library = dlopen(path, RTLD_NOW);
    TORCH_CHECK(library, dlerror());
    auto opjit_define = reinterpret_cast<int (*)()>(dlsym(library, "opjit_define"));
    TORCH_CHECK(opjit_define && opjit_define() == 0, "torch refused the op of ", path);
}

int main(int count, char **words)
{
    for (int i = 1; i < count - 1; i++)
        define(words[i]);
    torch::jit::Module model = torch::jit::load(words[count - 1]);
    std::cout << model.forward({torch::arange(4.0)}).toTensor() << std::endl;
}
