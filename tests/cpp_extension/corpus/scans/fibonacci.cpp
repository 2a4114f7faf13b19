#include <torch/extension.h>

int64_t fib(int64_t n) {
    if (n < 0) throw std::invalid_argument("fib: n must not be negative");
    return n < 2 ? n : fib(n - 1) + fib(n - 2);
}
torch::Tensor fib_tensor(int n) {
    std::vector<int64_t> values;
    for (int i = 0; i < n; ++i) values.push_back(fib(i));
    return torch::tensor(values, torch::dtype(torch::kInt64));
}
std::vector<int64_t> fib_list(int n) {
    auto t = fib_tensor(n);
    return std::vector<int64_t>(t.data_ptr<int64_t>(), t.data_ptr<int64_t>() + t.numel());
}
