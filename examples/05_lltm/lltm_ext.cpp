// The LLTM cell as a C++ extension: the same ops of ATen as in Python, without Python between them, and a backward
// written by hand.
#include <torch/library.h>
#include <ATen/ATen.h>

#include <tuple>

namespace {

using at::Tensor;

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward(
    const Tensor& x, const Tensor& weights, const Tensor& bias, const Tensor& old_h, const Tensor& old_cell) {
  Tensor both = at::cat({old_h, x}, 1);
  auto z = at::addmm(bias, both, weights.t()).chunk(3, 1);
  Tensor input_gate = z[0].sigmoid(), output_gate = z[1].sigmoid(), candidate = at::elu(z[2]);
  Tensor new_cell = at::addcmul(old_cell, candidate, input_gate);
  Tensor activated = new_cell.tanh();
  return {activated * output_gate, new_cell, both, input_gate, output_gate, candidate, activated};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& grad_h, const Tensor& grad_cell, const Tensor& weights, const Tensor& both, const Tensor& input_gate,
    const Tensor& output_gate, const Tensor& candidate, const Tensor& activated) {
  Tensor d_cell = at::tanh_backward(grad_h * output_gate, activated) + grad_cell;
  Tensor d_z = at::cat({at::sigmoid_backward(d_cell * candidate, input_gate),
                        at::sigmoid_backward(grad_h * activated, output_gate),
                        at::elu_backward(d_cell * input_gate, 1, 1, 1, /*is_result=*/true, candidate)}, 1);
  Tensor d_both = d_z.mm(weights);
  const int64_t state = input_gate.size(1);
  return {d_both.slice(1, state).contiguous(), d_z.t().mm(both), d_z.sum(0), d_both.slice(1, 0, state).contiguous(), d_cell};
}

}  // namespace

TORCH_LIBRARY(lltm_cpp, m) {
  m.def("forward(Tensor x, Tensor weights, Tensor bias, Tensor old_h, Tensor old_cell) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", &forward);
  m.def("backward(Tensor grad_h, Tensor grad_cell, Tensor weights, Tensor both, Tensor input_gate, Tensor output_gate, "
        "Tensor candidate, Tensor activated) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", &backward);
}
