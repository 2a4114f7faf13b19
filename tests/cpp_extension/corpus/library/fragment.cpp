#include <torch/extension.h>
#include <torch/library.h>

at::Tensor neg(const at::Tensor& x) { return -x; }
at::Tensor lists(std::vector<at::Tensor> xs, std::vector<int64_t> dims, std::string mode, bool flag) {
    auto total = at::stack(xs).sum(dims);
    return mode == "mean" && flag ? total / static_cast<double>(xs.size()) : total;
}

TORCH_LIBRARY_FRAGMENT(corpus_fragment, m) { m.def("neg(Tensor x) -> Tensor"); }
TORCH_LIBRARY_FRAGMENT(corpus_fragment, m) { m.def("lists(Tensor[] xs, int[] dims, str mode=\"sum\", bool flag=False) -> Tensor", lists); }
TORCH_LIBRARY_IMPL(corpus_fragment, CompositeImplicitAutograd, m) { m.impl("neg", neg); }
