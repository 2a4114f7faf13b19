#include <torch/extension.h>
#include <vector>

torch::Tensor literal() { return torch::tensor({1.5, 2.5, 3.5}); }
std::vector<torch::Tensor> literals() {
    return {torch::tensor(3), torch::tensor(2.5f), torch::tensor(true), torch::tensor({1, 2, 3}), torch::tensor({{1, 2}, {3, 4}}),
            torch::tensor({1.0, 2.0}, torch::kFloat32), torch::tensor({1, 0}, torch::dtype(torch::kBool)), torch::tensor({int64_t(5)}),
            torch::tensor(std::vector<float>{1, 2}), torch::tensor({true, false}), torch::scalar_tensor(3, torch::kDouble)};
}
torch::Tensor blob(int n) {
    std::vector<float> values(n);
    for (int i = 0; i < n; ++i) values[i] = i * 0.5f;
    return torch::from_blob(values.data(), {n}, torch::kFloat32).clone();
}
torch::Tensor blob_strided() {
    static double values[6] = {0, 1, 2, 3, 4, 5};
    return torch::from_blob(values, {3, 2}, {1, 3}, torch::TensorOptions().dtype(torch::kFloat64));
}
torch::Tensor blob_deleter(int n) {
    auto* data = new int64_t[n];
    for (int i = 0; i < n; i++) data[i] = i * i;
    return torch::from_blob(data, {n}, [](void* p) { delete[] static_cast<int64_t*>(p); }, torch::kInt64);
}
torch::Tensor from_list(std::vector<double> values) { return torch::tensor(values); }
torch::Tensor from_ints(std::vector<int64_t> values) { return torch::tensor(values); }
