#include <torch/extension.h>

torch::Tensor warned(torch::Tensor x) {
    TORCH_WARN("careful: ", x.numel(), " elements");
    return x;
}
torch::Tensor warned_once(torch::Tensor x) {
    for (int i = 0; i < 3; ++i) TORCH_WARN_ONCE("only once");
    return x;
}
void warned_and_failed() {
    TORCH_WARN("before the error");
    TORCH_CHECK(false, "the error");
}
