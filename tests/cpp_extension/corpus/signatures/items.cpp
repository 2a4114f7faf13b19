#include <torch/extension.h>
#include <pybind11/complex.h>

double item_double(torch::Tensor x) { return x.item<double>(); }
int item_int(torch::Tensor x) { return x.item<int>(); }
bool item_bool(torch::Tensor x) { return x.item<bool>(); }
float item_float(torch::Tensor x) { return x.item().toFloat(); }
int64_t item_long(torch::Tensor x) { return x.item().to<int64_t>(); }
std::complex<double> item_complex(torch::Tensor x) { c10::complex<double> c = x.item().toComplexDouble(); return {c.real(), c.imag()}; }
float item_half(torch::Tensor x) { return static_cast<float>(x.item<at::Half>()); }
uint8_t item_byte(torch::Tensor x) { return x.item<uint8_t>(); }
