#include <torch/extension.h>

#define UNARY(name, expression) \
    torch::Tensor name(torch::Tensor x) { return expression; }
UNARY(cube, x * x * x)
UNARY(half, x / 2)
UNARY(flip_sign, -x)
#undef UNARY
#ifdef _OPENMP
#define HAS_OPENMP true
#else
#define HAS_OPENMP false
#endif
#if defined(TORCH_VERSION_MAJOR) && TORCH_VERSION_MAJOR >= 2
bool version_two() { return true; }
#else
bool version_two() { return false; }
#endif
bool openmp() { return HAS_OPENMP; }
std::string where() { return std::string(__func__) + " " + C10_STRINGIZE(1 + 1); }
bool likely(int64_t n) { if (C10_LIKELY(n > 0)) return true; return C10_UNLIKELY(n < -5); }
