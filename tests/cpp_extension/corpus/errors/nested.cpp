#include <torch/extension.h>

static void inner(const torch::Tensor& x) { TORCH_CHECK(x.dim() == 2, "inner wants 2 dimensions, not ", x.dim()); }

bool caught(torch::Tensor x) {
    try {
        inner(x);
    } catch (const c10::Error& e) {
        return false;
    }
    return true;
}
std::string message(torch::Tensor x) {
    try {
        inner(x);
    } catch (const c10::Error& e) {
        return e.what_without_backtrace();
    } catch (const std::exception& e) {
        return "other";
    }
    return "none";
}
torch::Tensor rethrown(torch::Tensor x) {
    try {
        return x.view({3, 3});
    } catch (const std::exception&) {
        throw std::runtime_error("could not view");
    }
}
torch::Tensor index_error(torch::Tensor x) {
    try {
        return x[100];
    } catch (const c10::IndexError&) {
        return torch::zeros({});
    }
}
std::string value_error() {
    try {
        TORCH_CHECK_VALUE(false, "v");
    } catch (c10::ValueError& e) {
        return e.msg();
    }
    return "";
}
