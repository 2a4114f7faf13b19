#include <torch/extension.h>
#include <map>

std::tuple<torch::Tensor, int64_t, double, bool, std::string> five(torch::Tensor x) { return {x, x.numel(), 0.5, true, "five"}; }
std::pair<torch::Tensor, torch::Tensor> two(torch::Tensor x) { return std::make_pair(x, -x); }
std::tuple<> nothing() { return {}; }
void really_nothing(torch::Tensor) {}
std::map<std::string, torch::Tensor> named(torch::Tensor x) { return {{"x", x}, {"minus", -x}}; }
std::unordered_map<std::string, int64_t> shape(torch::Tensor x) { return {{"dim", x.dim()}}; }
at::ScalarType kind() { return at::kHalf; }
at::Layout layout(torch::Tensor x) { return x.layout(); }
at::Scalar scalar(torch::Tensor x) { return x.item(); }
const torch::Tensor& itself(const torch::Tensor& x) { return x; }
torch::Tensor& in_place(torch::Tensor& x) { return x.add_(1); }
std::vector<std::pair<int, float>> pairs() { return {{1, 1.5f}, {2, 2.5f}}; }
