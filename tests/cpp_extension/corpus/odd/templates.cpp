#include <torch/extension.h>
#include <type_traits>

template <typename T> struct Add { T operator()(T a, T b) const { return a + b; } };
template <typename T> struct Max { T operator()(T a, T b) const { return a < b ? b : a; } };

template <template <typename> class Op>
torch::Tensor fold(const torch::Tensor& x, double start) {
    auto in = x.contiguous();
    auto out = torch::empty({}, in.options());
    AT_DISPATCH_ALL_TYPES(in.scalar_type(), "fold", [&] {
        using acc_t = std::conditional_t<std::is_floating_point_v<scalar_t>, double, int64_t>;
        acc_t acc = static_cast<acc_t>(start);
        for (int64_t i = 0; i < in.numel(); ++i) acc = Op<acc_t>{}(acc, in.data_ptr<scalar_t>()[i]);
        out.fill_(static_cast<scalar_t>(acc));
    });
    return out;
}
torch::Tensor fold_add(torch::Tensor x) { return fold<Add>(x, 0); }
torch::Tensor fold_max(torch::Tensor x) { return fold<Max>(x, -1e6); }

template <typename... Ts>
torch::Tensor sum_of(const Ts&... xs) { return (xs + ...); }
torch::Tensor sum3(torch::Tensor a, torch::Tensor b, torch::Tensor c) { return sum_of(a, b, c); }
constexpr int64_t factorial(int64_t n) { return n < 2 ? 1 : n * factorial(n - 1); }
int64_t fact5() { static_assert(factorial(5) == 120); return factorial(5); }
