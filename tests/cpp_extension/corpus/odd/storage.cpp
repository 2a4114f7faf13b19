#include <torch/extension.h>

int64_t storage_bytes(torch::Tensor x) { return x.storage().nbytes(); }
bool shares(torch::Tensor a, torch::Tensor b) { return a.storage().is_alias_of(b.storage()); }
bool aligned(torch::Tensor x) { return reinterpret_cast<uintptr_t>(x.data_ptr()) % 4 == 0; }
std::string bytes(torch::Tensor x) {
    auto c = x.contiguous();
    return py::bytes(static_cast<const char*>(c.const_data_ptr()), c.nbytes()).cast<std::string>().substr(0, 0) + std::to_string(c.nbytes());
}
torch::Tensor viewed(torch::Tensor x) { return x.view(torch::kInt32); }
torch::Tensor real_view(torch::Tensor x) { return torch::view_as_real(x); }
