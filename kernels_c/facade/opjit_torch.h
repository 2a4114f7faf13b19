/*
 * opjit_torch.h - an extension's <torch/extension.h>, in a tenth of its time.
 *
 * torch's own header brings all operators, torch::nn, pybind11 and half of the C++ library. This one brings the names that the program
 * mentions; opjit.cpp_extension.facade writes the lists.
 */
#pragma once

#include "opjit_tensor.h"

#include <functional>

namespace at
{

/* A tensor over memory that the caller keeps, or that `deleter` frees. Without strides it is contiguous. */
inline Tensor opjit_from_blob(void *data, IntArrayRef sizes, const int64_t *strides,
                              std::function<void(void *)> *deleter, const TensorOptions &options)
{
    TORCH_CHECK(options.layout() == Layout::Strided, "from_blob makes strided tensors, got layout ", options.layout());
    std::vector<int64_t> contiguous(sizes.size(), 1);
    for (size_t i = sizes.size(); i-- > 1;)
        contiguous[i - 1] = contiguous[i] * std::max<int64_t>(sizes[i], 1);
    Device device = options.device();
    torch_tensor handle;
    opjit_ok(torch_from_blob(
        data, sizes.size(), sizes.data(), strides ? strides : contiguous.data(), 0,
        static_cast<int32_t>(options.dtype().toScalarType()), static_cast<int32_t>(device.type()), device.index(),
        &handle, static_cast<int32_t>(Layout::Strided), nullptr, 0,
        [](void *freed, void *context) {
            auto *kept = static_cast<std::function<void(void *)> *>(context);
            if (kept)
                (*kept)(freed);
            delete kept;
        },
        deleter));
    Tensor made(*reinterpret_cast<Tensor *>(handle));
    aoti_torch_delete_tensor_object(handle);
    if (options.requires_grad())
        made.set_requires_grad(true);
    return made;
}
inline const int64_t *opjit_strides(IntArrayRef sizes, IntArrayRef strides)
{
    TORCH_CHECK(sizes.size() == strides.size(), "expected as many strides as sizes, got ", strides.size(), " and ",
                sizes.size());
    return strides.data();
}
inline std::function<void(void *)> *opjit_kept(const std::function<void(void *)> &deleter)
{
    return deleter ? new std::function<void(void *)>(deleter) : nullptr;
}
inline Tensor from_blob(void *data, IntArrayRef sizes, IntArrayRef strides, const std::function<void(void *)> &deleter,
                        const TensorOptions &options = {})
{
    return opjit_from_blob(data, sizes, opjit_strides(sizes, strides), opjit_kept(deleter), options);
}
inline Tensor from_blob(void *data, IntArrayRef sizes, const std::function<void(void *)> &deleter,
                        const TensorOptions &options = {})
{
    return opjit_from_blob(data, sizes, nullptr, opjit_kept(deleter), options);
}
inline Tensor from_blob(void *data, IntArrayRef sizes, IntArrayRef strides, const TensorOptions &options = {})
{
    return opjit_from_blob(data, sizes, opjit_strides(sizes, strides), nullptr, options);
}
inline Tensor from_blob(void *data, IntArrayRef sizes, const TensorOptions &options = {})
{
    return opjit_from_blob(data, sizes, nullptr, nullptr, options);
}

/* A tensor of a vector's values, for torch::tensor. */
template <typename T>
Tensor tensor(ArrayRef<T> values, const TensorOptions &options)
{
    auto here = TensorOptions(c10::CppTypeToScalarType<T>::value);
    return from_blob(const_cast<T *>(values.data()), {static_cast<int64_t>(values.size())}, here)
        .clone()
        .to(options.merge_in(options.has_dtype() ? TensorOptions() : here));
}

struct AutoDispatchBelowAutograd { /* torch::tensor runs below autograd; what it calls records nothing anyway */
    ~AutoDispatchBelowAutograd() {}
};

} // namespace at

namespace torch
{

using namespace at;
using std::nullopt;
using std::optional;

using Dtype = at::ScalarType;
constexpr auto kUInt8 = at::kByte, kInt8 = at::kChar, kInt16 = at::kShort, kInt32 = at::kInt, kInt64 = at::kLong;
constexpr auto kUInt16 = at::kUInt16, kUInt32 = at::kUInt32, kUInt64 = at::kUInt64;
constexpr auto kFloat16 = at::kHalf, kFloat32 = at::kFloat, kFloat64 = at::kDouble;
constexpr auto kU8 = kUInt8, kI8 = kInt8, kI16 = kInt16, kI32 = kInt32, kI64 = kInt64;
constexpr auto kF16 = kFloat16, kF32 = kFloat32, kF64 = kFloat64;

namespace indexing = at::indexing;

namespace autograd
{

using Variable = at::Tensor;
using variable_list = std::vector<Variable>;
using at::AutoGradMode;
TORCH_API variable_list grad(const variable_list &outputs, const variable_list &inputs,
                             const variable_list &grad_outputs = {}, std::optional<bool> retain_graph = std::nullopt,
                             bool create_graph = false, bool allow_unused = false);
TORCH_API void backward(const variable_list &tensors, const variable_list &grad_tensors = {},
                        std::optional<bool> retain_graph = std::nullopt, bool create_graph = false,
                        const variable_list &inputs = {});

inline Variable make_variable(at::Tensor data, bool requires_grad)
{
    if (requires_grad)
        data.set_requires_grad(true);
    return data;
}

} // namespace autograd

} // namespace torch

#include "opjit_factories.h" /* torch::zeros and its like, as torch defines them */
#include "opjit_bind.h"
