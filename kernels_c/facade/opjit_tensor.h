/*
 * opjit_tensor.h - torch::Tensor for an extension: the handle that libtorch's functions take and return.
 *
 * A tensor is one pointer to libtorch's TensorImpl. Its references are counted by the stable C interface, its sizes and its dtype come from
 * there, and every operator is libtorch's own: opjit_methods.h and opjit_functions.h hold torch's declarations of those that a program names
 * (opjit.cpp_extension.facade cuts them out of torch's headers).
 */
#pragma once

#include "opjit_c10.h"
#include "opjit_shim.h"

#include <ATen/core/TensorAccessor.h>
#include <torch/headeronly/version.h>

#include "opjit_operators.h" /* at::_ops, as torch declares them */

extern "C" {
torch_error aoti_torch_new_tensor_handle(torch_tensor tensor, torch_tensor *copy);
torch_error aoti_torch_new_uninitialized_tensor(torch_tensor *tensor);
torch_error aoti_torch_get_numel(torch_tensor tensor, int64_t *numel);
torch_error aoti_torch_get_storage_offset(torch_tensor tensor, int64_t *offset);
torch_error aoti_torch_get_layout(torch_tensor tensor, int32_t *layout);
torch_error aoti_torch_is_contiguous(torch_tensor tensor, bool *contiguous);
size_t aoti_torch_dtype_element_size(int32_t dtype);
torch_error torch_from_blob(void *data, int64_t dim, const int64_t *sizes, const int64_t *strides, int64_t offset,
                            int32_t dtype, int32_t device_type, int32_t device_index, torch_tensor *tensor,
                            int32_t layout, const uint8_t *metadata, int64_t metadata_size,
                            void (*deleter)(void *data, void *context), void *context);
}

namespace c10
{

/* Only addresses of it are used, and functions that libtorch exports. */
struct C10_API TensorImpl {
    bool requires_grad() const;
    void set_requires_grad(bool requires_grad);
    const at::Tensor &grad() const;
    at::Tensor &mutable_grad();
    bool has_storage() const;
};

struct C10_API UndefinedTensorImpl final : TensorImpl {
    static UndefinedTensorImpl _singleton;
};

namespace detail
{
template <typename T>
C10_API T maybe_wrap_dim_slow(T dim, T dim_post_expr, bool wrap_scalar);
} // namespace detail

inline int64_t maybe_wrap_dim(int64_t dim, int64_t range, bool wrap_scalar = true)
{
    if (dim >= -range && dim < range)
        return dim < 0 ? dim + range : dim;
    return detail::maybe_wrap_dim_slow<int64_t>(dim, range, wrap_scalar);
}

} // namespace c10

namespace at
{

/* The stable interface takes the address of a tensor, as it is torch's own object. */
inline torch_tensor opjit_handle(const TensorBase *tensor)
{
    return reinterpret_cast<torch_tensor>(const_cast<TensorBase *>(tensor));
}

inline void opjit_ok(torch_error error)
{
    if (error) {
        const char *what =
            torch_exception_get_what_without_backtrace ? torch_exception_get_what_without_backtrace() : nullptr;
        TORCH_CHECK(false, what ? what : "a function of libtorch failed");
    }
}

class TORCH_API TensorBase
{
  public:
    TensorBase() : impl_(undefined()) {}
    TensorBase(const TensorBase &other) : impl_(other.defined() ? new_reference(other) : undefined()) {}
    TensorBase(TensorBase &&other) noexcept : impl_(std::exchange(other.impl_, undefined())) {}
    TensorBase &operator=(const TensorBase &other) &
    {
        TensorBase copy(other);
        std::swap(impl_, copy.impl_);
        return *this;
    }
    TensorBase &operator=(TensorBase &&other) & noexcept
    {
        TensorBase taken(std::move(other));
        std::swap(impl_, taken.impl_);
        return *this;
    }
    ~TensorBase() { release(); }

    bool defined() const { return impl_ != undefined(); }
    void reset() { *this = TensorBase(); }
    bool is_same(const TensorBase &other) const noexcept { return impl_ == other.impl_; }
    c10::TensorImpl *unsafeGetTensorImpl() const { return impl_; }

    int64_t dim() const { return asked<int64_t>(aoti_torch_get_dim); }
    int64_t ndimension() const { return dim(); }
    int64_t numel() const { return asked<int64_t>(aoti_torch_get_numel); }
    int64_t storage_offset() const { return asked<int64_t>(aoti_torch_get_storage_offset); }
    IntArrayRef sizes() const { return IntArrayRef(asked<int64_t *>(aoti_torch_get_sizes), dim()); }
    IntArrayRef strides() const { return IntArrayRef(asked<int64_t *>(aoti_torch_get_strides), dim()); }
    SymIntArrayRef sym_sizes() const { return fromIntArrayRefSlow(sizes()); }
    SymIntArrayRef sym_strides() const { return fromIntArrayRefSlow(strides()); }
    SymInt sym_size(int64_t dimension) const { return size(dimension); }
    SymInt sym_numel() const { return numel(); }
    int64_t size(int64_t dimension) const
    {
        IntArrayRef all = sizes();
        return all[maybe_wrap_dim(dimension, static_cast<int64_t>(all.size()), false)];
    }
    int64_t stride(int64_t dimension) const
    {
        IntArrayRef all = strides();
        return all[maybe_wrap_dim(dimension, static_cast<int64_t>(all.size()), false)];
    }
    ScalarType scalar_type() const { return static_cast<ScalarType>(asked<int32_t>(aoti_torch_get_dtype)); }
    caffe2::TypeMeta dtype() const { return scalar_type(); }
    Layout layout() const { return static_cast<Layout>(asked<int32_t>(aoti_torch_get_layout)); }
    Device device() const
    {
        return Device(static_cast<DeviceType>(asked<int32_t>(aoti_torch_get_device_type)),
                      static_cast<DeviceIndex>(asked<int32_t>(aoti_torch_get_device_index)));
    }
    DeviceIndex get_device() const { return device().index(); }
    TensorOptions options() const { return TensorOptions().dtype(dtype()).device(device()).layout(layout()); }
    size_t itemsize() const { return elementSize(scalar_type()); }
    int64_t element_size() const { return static_cast<int64_t>(itemsize()); }
    size_t nbytes() const
    {
        TORCH_CHECK(layout() != kSparse,
                    "nbytes is not defined for sparse tensors.  If you want the size of the constituent "
                    "tensors, add the nbytes of the indices and values.  If you want the size of the  "
                    "equivalent dense tensor, multiply numel() by element_size()");
        return numel() * itemsize();
    }
    bool is_contiguous() const { return asked<bool>(aoti_torch_is_contiguous); }
    bool is_contiguous(MemoryFormat format) const
    {
        return format == MemoryFormat::ChannelsLast     ? is_channels_last(4)
               : format == MemoryFormat::ChannelsLast3d ? is_channels_last(5)
                                                        : is_contiguous();
    }
    bool is_complex() const { return isComplexType(scalar_type()); }
    bool is_quantized() const { return isQIntType(scalar_type()); }
    bool is_floating_point() const { return isFloatingType(scalar_type()); }
    bool is_cpu() const { return defined() && device().is_cpu(); }
    bool is_cuda() const { return defined() && device().is_cuda(); }
    bool is_meta() const { return defined() && device().is_meta(); }
    bool is_sparse() const { return layout() == kSparse; }
    bool has_storage() const { return defined() && impl_->has_storage(); }
    TensorBase contiguous(MemoryFormat format = MemoryFormat::Contiguous) const
    {
        return format == MemoryFormat::Contiguous && is_contiguous() ? *this : __dispatch_contiguous(format);
    }

    void *data_ptr() const { return mutable_data_ptr(); }
    void *mutable_data_ptr() const { return asked<void *>(torch_get_mutable_data_ptr); }
    const void *const_data_ptr() const { return asked<const void *>(torch_get_const_data_ptr); }
    template <typename T>
    T *data_ptr() const; /* libtorch's, for each dtype */
    template <typename T>
    T *mutable_data_ptr() const;
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 12
    template <typename T, std::enable_if_t<!std::is_const_v<T>, int> = 0>
    const T *const_data_ptr() const;
    template <typename T, std::enable_if_t<std::is_const_v<T>, int> = 0>
    const std::remove_const_t<T> *const_data_ptr() const;
#else
    template <typename T>
    const T *const_data_ptr() const;
#endif

    template <typename T, size_t N>
    TensorAccessor<T, N> accessor() const &
    {
        static_assert(N > 0, "accessor is used for indexing tensor, for scalars use *data_ptr<T>()");
        TORCH_CHECK(dim() == N, "TensorAccessor expected ", N, " dims but tensor has ", dim());
        return TensorAccessor<T, N>(data_of<T>(), sizes().data(), strides().data());
    }
    template <typename T, size_t N>
    TensorAccessor<T, N> accessor() && = delete;
    template <typename T, size_t N, template <typename U> class PtrTraits = DefaultPtrTraits,
              typename index_t = int64_t>
    GenericPackedTensorAccessor<T, N, PtrTraits, index_t> generic_packed_accessor() const &
    {
        static_assert(N > 0, "accessor is used for indexing tensor, for scalars use *data_ptr<T>()");
        TORCH_CHECK(dim() == N, "TensorAccessor expected ", N, " dims but tensor has ", dim());
        return GenericPackedTensorAccessor<T, N, PtrTraits,
                                           index_t>(static_cast<typename PtrTraits<T>::PtrType>(data_of<T>()),
                                                    sizes().data(), strides().data());
    }
    template <typename T, size_t N, template <typename U> class PtrTraits = DefaultPtrTraits>
    PackedTensorAccessor32<T, N, PtrTraits> packed_accessor32() const &
    {
        TORCH_CHECK(numel() <= static_cast<int64_t>(std::numeric_limits<int32_t>::max()),
                    "numel needs to be smaller than int32_t max; otherwise, please use packed_accessor64");
        return generic_packed_accessor<T, N, PtrTraits, int32_t>();
    }
    template <typename T, size_t N, template <typename U> class PtrTraits = DefaultPtrTraits>
    PackedTensorAccessor64<T, N, PtrTraits> packed_accessor64() const &
    {
        return generic_packed_accessor<T, N, PtrTraits, int64_t>();
    }
    template <typename T, size_t N, template <typename U> class PtrTraits = DefaultPtrTraits>
    PackedTensorAccessor32<T, N, PtrTraits> packed_accessor32() && = delete;
    template <typename T, size_t N, template <typename U> class PtrTraits = DefaultPtrTraits>
    PackedTensorAccessor64<T, N, PtrTraits> packed_accessor64() && = delete;

    bool requires_grad() const { return impl_->requires_grad(); }
    const TensorBase &set_requires_grad(bool requires_grad) const
    {
        impl_->set_requires_grad(requires_grad);
        return *this;
    }
    const TensorBase &requires_grad_(bool requires_grad = true) const;
    bool is_leaf() const;
    bool is_view() const;
    bool retains_grad() const;
    void retain_grad() const;
    int64_t _version() const;
    int64_t output_nr() const;
    TensorBase data() const;
    TensorBase tensor_data() const;
    TensorBase variable_data() const;
    void set_data(const TensorBase &data) const;
    std::string toString() const;
    void print() const;

  protected:
    c10::TensorImpl *impl_;

  private:
    static c10::TensorImpl *undefined() { return &c10::UndefinedTensorImpl::_singleton; }
    TensorBase __dispatch_contiguous(c10::MemoryFormat format) const;

    template <typename R, typename F>
    R asked(F *function) const
    {
        R result;
        opjit_ok(function(opjit_handle(this), &result));
        return result;
    }
    /* Channels innermost: the strides of dimensions 1, last, ..., 2, 0 grow, where a size is not one. */
    bool is_channels_last(int64_t dimensions) const
    {
        if (dim() != dimensions)
            return false;
        int64_t expected = 1;
        auto fits = [&](int64_t d) {
            if (size(d) == 1)
                return true;
            bool same = stride(d) == expected;
            expected *= size(d);
            return same;
        };
        if (!fits(1))
            return false;
        for (int64_t d = dimensions - 1; d >= 2; d--)
            if (!fits(d))
                return false;
        return fits(0);
    }
    template <typename T>
    T *data_of() const
    {
        if constexpr (std::is_const_v<T>)
            return const_data_ptr<T>();
        else
            return mutable_data_ptr<T>();
    }
    /* A handle is the address of a tensor on the heap: it lends its pointer to copy and to free a reference. */
    static c10::TensorImpl *new_reference(const TensorBase &other)
    {
        torch_tensor handle;
        opjit_ok(aoti_torch_new_tensor_handle(opjit_handle(&other), &handle));
        c10::TensorImpl *impl = std::exchange(*reinterpret_cast<c10::TensorImpl **>(handle), undefined());
        aoti_torch_delete_tensor_object(handle);
        return impl;
    }
    void release() noexcept
    {
        torch_tensor handle;
        if (impl_ == undefined() || aoti_torch_new_uninitialized_tensor(&handle))
            return;
        *reinterpret_cast<c10::TensorImpl **>(handle) = impl_;
        aoti_torch_delete_tensor_object(handle);
    }
};

namespace indexing
{
struct TensorIndex;
}

class TORCH_API Tensor : public TensorBase
{
  public:
    Tensor() = default;
    Tensor(const Tensor &) = default;
    Tensor(Tensor &&) = default;
    explicit Tensor(const TensorBase &base) : TensorBase(base) {}
    Tensor(TensorBase &&base) : TensorBase(std::move(base)) {}

    Tensor &operator=(const TensorBase &other) & noexcept
    {
        TensorBase::operator=(other);
        return *this;
    }
    Tensor &operator=(TensorBase &&other) & noexcept
    {
        TensorBase::operator=(std::move(other));
        return *this;
    }
    Tensor &operator=(const Tensor &other) & noexcept { return operator=(static_cast<const TensorBase &>(other)); }
    Tensor &operator=(Tensor &&other) & noexcept { return operator=(static_cast<TensorBase &&>(other)); }
    Tensor &operator=(const Scalar &value) && { return fill_(value); } /* x[0] = 1 writes into x */
    Tensor &operator=(const Tensor &other) && { return copy_(other); }
    Tensor &operator=(Tensor &&other) && { return copy_(other); }

    Tensor contiguous(MemoryFormat format = MemoryFormat::Contiguous) const { return TensorBase::contiguous(format); }
    using TensorBase::data;
    using TensorBase::size;
    using TensorBase::stride;
    template <typename T>
    T item() const;
    template <typename T>
    T *data() const
    {
        return data_ptr<T>();
    }
    Tensor data() const { return TensorBase::data(); }
    Tensor tensor_data() const { return TensorBase::tensor_data(); }
    Tensor variable_data() const { return TensorBase::variable_data(); }
    struct [[gnu::abi_tag("opjit")]]
    Type { /* what is left of the deprecated Tensor::type(): AT_DISPATCH takes it, and its dtype and device are asked */
        ScalarType dtype;
        bool cuda;
        ScalarType scalarType() const { return dtype; }
        bool is_cuda() const { return cuda; }
    };
    Type type() const { return {scalar_type(), is_cuda()}; }
    Tensor toType(ScalarType type) const { return to(options().dtype(type)); }
    Tensor cpu() const { return to(options().device(DeviceType::CPU)); }
    Tensor cuda() const { return to(options().device(DeviceType::CUDA)); }
    template <typename T, size_t N, template <typename U> class PtrTraits = DefaultPtrTraits,
              typename index_t = int64_t>
    GenericPackedTensorAccessor<T, N, PtrTraits, index_t> packed_accessor() const &
    {
        return generic_packed_accessor<T, N, PtrTraits, index_t>();
    }

    Tensor operator~() const { return bitwise_not(); }
    Tensor operator-() const { return neg(); }
    Tensor &operator+=(const Tensor &other) { return add_(other); }
    Tensor &operator+=(const Scalar &other) { return add_(other); }
    Tensor &operator-=(const Tensor &other) { return sub_(other); }
    Tensor &operator-=(const Scalar &other) { return sub_(other); }
    Tensor &operator*=(const Tensor &other) { return mul_(other); }
    Tensor &operator*=(const Scalar &other) { return mul_(other); }
    Tensor &operator/=(const Tensor &other) { return div_(other); }
    Tensor &operator/=(const Scalar &other) { return div_(other); }
    Tensor &operator&=(const Tensor &other) { return bitwise_and_(other); }
    Tensor &operator|=(const Tensor &other) { return bitwise_or_(other); }
    Tensor &operator^=(const Tensor &other) { return bitwise_xor_(other); }
    Tensor operator[](int64_t index) const { return select(0, index); }
    Tensor operator[](const Scalar &index) const
    {
        TORCH_CHECK_INDEX(index.isIntegral(false), "Can only index tensors with integral scalars");
        return (*this)[index.toLong()];
    }
    Tensor operator[](const Tensor &index) const
    {
        TORCH_CHECK_INDEX(index.defined(), "Can only index with tensors that are defined");
        TORCH_CHECK_INDEX(index.dim() == 0, "Can only index with tensors that are scalars (zero-dim)");
        return (*this)[index.item()];
    }
    Tensor index(ArrayRef<at::indexing::TensorIndex> indices) const;
    Tensor index(std::initializer_list<at::indexing::TensorIndex> indices) const;
    Tensor &index_put_(ArrayRef<at::indexing::TensorIndex> indices, Tensor const &values);
    Tensor &index_put_(ArrayRef<at::indexing::TensorIndex> indices, const Scalar &value);
    Tensor &index_put_(std::initializer_list<at::indexing::TensorIndex> indices, Tensor const &values);
    Tensor &index_put_(std::initializer_list<at::indexing::TensorIndex> indices, const Scalar &value);

    void backward(const Tensor &gradient = {}, std::optional<bool> retain_graph = std::nullopt,
                  bool create_graph = false, std::optional<TensorList> inputs = std::nullopt) const
    {
        TORCH_CHECK(!inputs || inputs->size() > 0, "'inputs' argument to backward cannot be empty");
        _backward(inputs.value_or(TensorList()), gradient, retain_graph, create_graph);
    }
    const Tensor &set_requires_grad(bool requires_grad) const
    {
        TensorBase::set_requires_grad(requires_grad);
        return *this;
    }
    const Tensor &requires_grad_(bool requires_grad = true) const
    {
        TensorBase::requires_grad_(requires_grad);
        return *this;
    }
    const Tensor &grad() const
    {
        const Tensor &found = impl_->grad();
        if (!is_leaf() && !retains_grad() && !found.defined())
            TORCH_WARN("The .grad attribute of a Tensor that is not a leaf Tensor is being accessed. Its .grad "
                       "attribute won't be populated during autograd.backward(). If you indeed want the .grad "
                       "field to be populated for a non-leaf Tensor, use .retain_grad() on the non-leaf Tensor. "
                       "If you access the non-leaf Tensor by mistake, make sure you access the leaf Tensor "
                       "instead. See github.com/pytorch/pytorch/pull/30531 for more information.");
        return found;
    }
    Tensor &mutable_grad() const { return impl_->mutable_grad(); }

    void _backward(TensorList inputs, const std::optional<Tensor> &gradient, std::optional<bool> keep_graph,
                   bool create_graph) const;

#include "opjit_methods.h"
};

} // namespace at

#include "opjit_functions.h" /* the methods' bodies and at::'s functions, as torch defines them */

namespace at
{

#define OPJIT_BINARY(op, body, swapped) \
    inline Tensor operator op(const Tensor &x, const Tensor &y) \
    { \
        return body; \
    } \
    inline Tensor operator op(const Tensor &x, const Scalar &y) \
    { \
        return body; \
    } \
    inline Tensor operator op(const Scalar &x, const Tensor &y) \
    { \
        return swapped; \
    }
OPJIT_BINARY(+, x.add(y), y.add(x))
OPJIT_BINARY(*, x.mul(y), y.mul(x))
OPJIT_BINARY(-, x.sub(y), at::empty_like(y, MemoryFormat::Preserve).fill_(x).sub_(y))
OPJIT_BINARY(/, x.div(y), at::empty_like(y, MemoryFormat::Preserve).fill_(x).div_(y))
OPJIT_BINARY(%, x.remainder(y), at::empty_like(y, MemoryFormat::Preserve).fill_(x).remainder_(y))
OPJIT_BINARY(&, x.bitwise_and(y), y.bitwise_and(x))
OPJIT_BINARY(|, x.bitwise_or(y), y.bitwise_or(x))
OPJIT_BINARY(^, x.bitwise_xor(y), y.bitwise_xor(x))
OPJIT_BINARY(<, x.lt(y), y.gt(x))
OPJIT_BINARY(<=, x.le(y), y.ge(x))
OPJIT_BINARY(>, x.gt(y), y.lt(x))
OPJIT_BINARY(>=, x.ge(y), y.le(x))
OPJIT_BINARY(==, x.eq(y), y.eq(x))
OPJIT_BINARY(!=, x.ne(y), y.ne(x))
#undef OPJIT_BINARY

TORCH_API std::ostream &print(std::ostream &out, const Tensor &tensor, int64_t linesize);
inline std::ostream &operator<<(std::ostream &out, const Tensor &tensor)
{
    return print(out, tensor, 80);
}

/* --- indices ------------------------------------------------------------------------------------------------------------------------- */

namespace indexing
{

enum class TensorIndexType { None, Ellipsis, SymInt, Boolean, Slice, Tensor };
constexpr std::nullopt_t None = std::nullopt;
struct TORCH_API EllipsisIndexType final {
    EllipsisIndexType() = default;
};
TORCH_API extern const EllipsisIndexType Ellipsis;

struct TORCH_API Slice final {
    Slice(std::optional<SymInt> start = std::nullopt, std::optional<SymInt> stop = std::nullopt,
          std::optional<SymInt> step = std::nullopt)
    {
        constexpr int64_t least = SymInt::LIMIT, greatest = -(SymInt::LIMIT + 1);
        int64_t by = step ? step->expect_int() : 1;
        TORCH_CHECK_VALUE(by != 0, "slice step cannot be zero");
        step_ = SymInt(by);
        start_ = start ? *start : SymInt(by < 0 ? greatest : 0);
        stop_ = stop ? *stop : SymInt(by < 0 ? least : greatest);
    }

  private:
    SymInt start_, stop_, step_;
};

struct TORCH_API TensorIndex final {
    TensorIndex(std::nullopt_t) : type_(TensorIndexType::None) {}
    TensorIndex(EllipsisIndexType) : type_(TensorIndexType::Ellipsis) {}
    TensorIndex(const char *text) : type_(TensorIndexType::Ellipsis)
    {
        TORCH_CHECK_VALUE(std::strcmp(text, "...") == 0, "Expected \"...\" to represent an ellipsis index, but got \"",
                          text, "\"");
    }
    TensorIndex(SymInt integer) : integer_(integer), type_(TensorIndexType::SymInt) {}
    TensorIndex(int64_t integer) : TensorIndex(SymInt(integer)) {}
    TensorIndex(int integer) : TensorIndex(SymInt(integer)) {}
    template <class T, class = std::enable_if_t<std::is_same_v<bool, T>>>
    TensorIndex(T boolean) : boolean_(boolean), type_(TensorIndexType::Boolean)
    {
    }
    TensorIndex(Slice slice) : slice_(std::move(slice)), type_(TensorIndexType::Slice) {}
    TensorIndex(Tensor tensor) : tensor_(std::move(tensor)), type_(TensorIndexType::Tensor) {}

  private:
    SymInt integer_ = 0;
    bool boolean_ = false;
    Slice slice_;
    Tensor tensor_;
    TensorIndexType type_;
};

} // namespace indexing
} // namespace at
