#include <torch/extension.h>

template <typename scalar_t, int BLOCK = 8>
struct Gemm {
    static void run(const scalar_t* a, const scalar_t* b, scalar_t* c, int64_t m, int64_t n, int64_t k, scalar_t alpha) {
        for (int64_t jj = 0; jj < n; jj += BLOCK)
            for (int64_t i = 0; i < m; ++i)
                for (int64_t j = jj; j < std::min<int64_t>(jj + BLOCK, n); ++j) {
                    scalar_t acc = 0;
                    for (int64_t p = 0; p < k; ++p) acc += a[i * k + p] * b[p * n + j];
                    c[i * n + j] += alpha * acc;
                }
    }
};

torch::Tensor gemm(torch::Tensor a, torch::Tensor b, torch::Tensor c, double alpha) {
    TORCH_CHECK(a.device().is_cpu(), "a must be on the CPU, not on ", a.device());
    auto out = c.clone();
    auto ac = a.contiguous(), bc = b.contiguous();
    AT_DISPATCH_FLOATING_TYPES(a.scalar_type(), "gemm", ([&] {
        Gemm<scalar_t>::run(ac.data_ptr<scalar_t>(), bc.data_ptr<scalar_t>(), out.data_ptr<scalar_t>(), a.size(0), b.size(1), a.size(1), static_cast<scalar_t>(alpha));
    }));
    return out;
}
