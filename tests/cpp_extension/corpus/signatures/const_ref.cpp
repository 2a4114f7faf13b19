#include <torch/extension.h>

at::Tensor by_value(at::Tensor x) { x = x + 1; return x; }
at::Tensor by_ref(const at::Tensor& x) { return x + 1; }
at::Tensor by_mutable(at::Tensor& x) { x = x * 2; return x; }
at::Tensor by_move(at::Tensor&& x) { return std::move(x); }
int64_t uses(at::Tensor x) { return x.use_count() > 0; }
bool same(const at::Tensor& a, const at::Tensor& b) { return a.is_same(b) && a.unsafeGetTensorImpl() == b.unsafeGetTensorImpl(); }
intptr_t offset(at::Tensor a, at::Tensor b) { return static_cast<char*>(b.data_ptr()) - static_cast<char*>(a.data_ptr()); }
