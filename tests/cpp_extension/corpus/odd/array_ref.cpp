#include <torch/extension.h>

int64_t product(at::IntArrayRef v) { return c10::multiply_integers(v); }
std::vector<int64_t> sliced(const std::vector<int64_t>& v) {
    at::ArrayRef<int64_t> a(v);
    return a.empty() ? std::vector<int64_t>{} : a.slice(0, a.size() - 1).vec();
}
bool equals(torch::Tensor x, std::vector<int64_t> s) { return x.sizes() == at::IntArrayRef(s) && x.sizes().equals(s); }
torch::Tensor fixed() { const int64_t shape[] = {2, 3}; return torch::zeros(at::IntArrayRef(shape, 2)); }
torch::Tensor small(torch::Tensor x) {
    c10::SmallVector<int64_t, 4> shape(x.sizes().begin(), x.sizes().end());
    shape.push_back(1);
    return x.reshape(shape);
}
torch::Tensor dimvec(torch::Tensor x) {
    at::DimVector d = {x.numel()};
    return x.reshape(d);
}
std::string text(std::vector<int64_t> v) { return c10::str(at::IntArrayRef(v)); }
int64_t back(at::IntArrayRef v) { return v.back() + v.front() + v.at(0); }
