#include <torch/extension.h>

#define JOIN(a, b) a##b
#define MAKE(a, b) torch::a##b
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)
at::Tensor made(double value) { return MAKE(scalar_, tensor)(value, torch::requires_grad()); }
at::Tensor like(at::Tensor x) { return MAKE(zeros_, like)(x, torch::requires_grad()); }
at::Tensor first(at::Tensor x) { return x.JOIN(ind, ex)({0}); }
std::string major() { return TEXT(JOIN(TORCH_VERSION_, MAJOR)); }
