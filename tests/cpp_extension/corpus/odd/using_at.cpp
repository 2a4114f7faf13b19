#include <torch/extension.h>
using namespace at;

Tensor plus_one(const Tensor& x) { return add(x, ones_like(x)); }
Tensor reduce_all(Tensor x, IntArrayRef dims) { return x.sum(dims, true) + zeros({1}, x.options()); }
std::tuple<Tensor, Tensor> split_two(const Tensor& x) {
    auto parts = chunk(x, 2, 0);
    return std::make_tuple(parts[0], parts[1]);
}
Tensor typed(const Tensor& x, ScalarType t) { return x.to(t); }
Tensor with_scalar(const Tensor& x, const Scalar& s) { return mul(x, s); }
