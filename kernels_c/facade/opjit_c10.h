/*
 * opjit_c10.h - the small types of c10 that torch's operators take, without torch's heavy headers.
 *
 * Array references, Scalar, SymInt, Device and the arguments that only pass through have the size, the layout and the name of torch's, as
 * libtorch's functions are called with them. TensorOptions and TypeMeta never reach libtorch: the tag of their namespace is part of the
 * names of all functions that return them, so that none of those is taken for torch's. The texts of errors are torch's.
 */
#pragma once

#include <array>
#include <cstring>
#include <math.h> /* the C++ library's: abs, exp and their like for every type, as torch's headers bring them */
#include <stdlib.h>
#include <initializer_list>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace std
{

/* torch prints vectors so: at most a hundred values, separated by spaces. */
template <typename T, typename A>
ostream &operator<<(ostream &out, const vector<T, A> &values)
{
    int left = 100;
    for (auto it = values.begin(); it != values.end() && left > 0; left--) {
        out << *it;
        if (++it != values.end() && left > 1)
            out << ' ';
        if (left == 1 && it != values.end())
            out << " ...";
    }
    return out;
}

} // namespace std

#include <c10/util/Exception.h>
#include <c10/util/TypeCast.h>
#include <torch/headeronly/core/DeviceType.h>
#include <torch/headeronly/core/Layout.h>
#include <torch/headeronly/core/MemoryFormat.h>
#include <torch/headeronly/core/ScalarType.h>

namespace at
{
class Tensor;
class TensorBase;
class OptionalTensorRef;
class Dimname;
} // namespace at

namespace c10
{

/* --- dtypes ------------------------------------------------------------------------------------------------------------------------- */

using torch::headeronly::Layout;
using torch::headeronly::MemoryFormat;
using torch::headeronly::ScalarType;

#define OPJIT_K(type, name) constexpr ScalarType k##name = ScalarType::name;
AT_FORALL_SCALAR_TYPES_WITH_COMPLEX_AND_QINTS(OPJIT_K)
#undef OPJIT_K

inline bool isIntegralType(ScalarType type, bool include_bool)
{
    bool integral = type == kByte || type == kChar || type == kInt || type == kLong || type == kShort ||
                    type == ScalarType::UInt16 || type == ScalarType::UInt32 || type == ScalarType::UInt64;
    return integral || (include_bool && type == kBool);
}

inline bool isComplexType(ScalarType type)
{
    return type == ScalarType::ComplexHalf || type == ScalarType::ComplexFloat || type == ScalarType::ComplexDouble;
}

inline bool isReducedFloatingType(ScalarType type)
{
    return type == kHalf || type == kBFloat16 || type == ScalarType::Float8_e5m2 || type == ScalarType::Float8_e4m3fn ||
           type == ScalarType::Float8_e5m2fnuz || type == ScalarType::Float8_e4m3fnuz ||
           type == ScalarType::Float8_e8m0fnu || type == ScalarType::Float4_e2m1fn_x2;
}

inline bool isFloatingType(ScalarType type)
{
    return type == kDouble || type == kFloat || isReducedFloatingType(type);
}

C10_API ScalarType get_default_dtype_as_scalartype();

/* Sizes of one element in bytes. */
inline size_t elementSize(ScalarType type)
{
#define OPJIT_CASE(ctype, name) \
    case ScalarType::name: return sizeof(ctype);
    switch (type) {
        AT_FORALL_SCALAR_TYPES_WITH_COMPLEX_AND_QINTS(OPJIT_CASE)
    default: TORCH_CHECK(false, "Unknown ScalarType");
    }
#undef OPJIT_CASE
}

using string_view = std::string_view;
class DispatchKeySet;
template <typename T>
using optional = std::optional<T>;
using std::in_place;
using std::make_optional;
using std::nullopt;
using std::nullopt_t;

/* These are complete types because functions pass them by value; a program that names them is built with torch's headers. */
struct Storage {
    ~Storage() {}
    void *impl;
};
class Stream;
template <typename T>
class List;
enum class DispatchKey : uint16_t;

/* --- arrays ------------------------------------------------------------------------------------------------------------------------- */

template <typename T>
class ArrayRef final
{
  public:
    using iterator = const T *;
    using const_iterator = const T *;
    using size_type = size_t;
    using value_type = T;

    constexpr ArrayRef() : data_(nullptr), length_(0) {}
    constexpr ArrayRef(const T &one) : data_(&one), length_(1) {}
    constexpr ArrayRef(const T *data, size_t length) : data_(data), length_(length) {}
    constexpr ArrayRef(const T *begin, const T *end) : data_(begin), length_(end - begin) {}
    template <typename A>
    ArrayRef(const std::vector<T, A> &v) : data_(v.data()), length_(v.size())
    {
        static_assert(!std::is_same_v<T, bool>,
                      "ArrayRef<bool> cannot be constructed from a std::vector<bool> bitfield.");
    }
    template <size_t N>
    constexpr ArrayRef(const std::array<T, N> &a) : data_(a.data()), length_(N)
    {
    }
    template <size_t N>
    constexpr ArrayRef(const T (&a)[N]) : data_(a), length_(N)
    {
    }
    constexpr ArrayRef(const std::initializer_list<T> &list)
        : data_(list.begin() == list.end() ? nullptr : list.begin()), length_(list.size())
    {
    }

    constexpr const T *begin() const { return data_; }
    constexpr const T *end() const { return data_ + length_; }
    constexpr const T *cbegin() const { return data_; }
    constexpr const T *cend() const { return data_ + length_; }
    constexpr auto rbegin() const { return std::reverse_iterator<const T *>(end()); }
    constexpr auto rend() const { return std::reverse_iterator<const T *>(begin()); }
    constexpr bool empty() const { return length_ == 0; }
    constexpr const T *data() const { return data_; }
    constexpr size_t size() const { return length_; }
    constexpr const T &operator[](size_t index) const { return data_[index]; }
    const T &front() const
    {
        TORCH_CHECK(!empty(), "ArrayRef: attempted to access front() of empty list");
        return data_[0];
    }
    const T &back() const
    {
        TORCH_CHECK(!empty(), "ArrayRef: attempted to access back() of empty list");
        return data_[length_ - 1];
    }
    const T &at(size_t index) const
    {
        TORCH_CHECK(index < length_, "ArrayRef: invalid index Index = ", index, "; Length = ", length_);
        return data_[index];
    }
    bool equals(ArrayRef other) const
    {
        if (length_ != other.length_)
            return false;
        for (size_t i = 0; i < length_; i++)
            if (!(data_[i] == other.data_[i]))
                return false;
        return true;
    }
    ArrayRef slice(size_t start, size_t length) const
    {
        TORCH_CHECK(start + length <= length_, "ArrayRef: invalid slice, N = ", start, "; M = ", length,
                    "; size = ", length_);
        return ArrayRef(data_ + start, length);
    }
    ArrayRef slice(size_t start) const { return slice(start, length_ - start); }
    std::vector<T> vec() const { return std::vector<T>(begin(), end()); }

  private:
    const T *data_;
    size_t length_;
};

template <typename T>
bool operator==(ArrayRef<T> a, ArrayRef<T> b)
{
    return a.equals(b);
}
template <typename T>
bool operator!=(ArrayRef<T> a, ArrayRef<T> b)
{
    return !a.equals(b);
}
template <typename T>
bool operator==(const std::vector<T> &a, ArrayRef<T> b)
{
    return ArrayRef<T>(a).equals(b);
}
template <typename T>
bool operator!=(const std::vector<T> &a, ArrayRef<T> b)
{
    return !ArrayRef<T>(a).equals(b);
}
template <typename T>
bool operator==(ArrayRef<T> a, const std::vector<T> &b)
{
    return a.equals(ArrayRef<T>(b));
}
template <typename T>
bool operator!=(ArrayRef<T> a, const std::vector<T> &b)
{
    return !a.equals(ArrayRef<T>(b));
}

template <typename T>
std::ostream &operator<<(std::ostream &out, ArrayRef<T> list)
{
    out << '[';
    for (size_t i = 0; i < list.size(); i++)
        out << (i ? ", " : "") << list[i];
    return out << ']';
}

using IntArrayRef = ArrayRef<int64_t>;

template <typename T>
class OptionalArrayRef final
{
  public:
    OptionalArrayRef() noexcept = default;
    OptionalArrayRef(std::nullopt_t) noexcept {}
    OptionalArrayRef(const T &one) : array_(one) {}
    OptionalArrayRef(ArrayRef<T> array) : array_(array) {}
    OptionalArrayRef(const std::initializer_list<T> &list) : array_(ArrayRef<T>(list)) {}
    OptionalArrayRef(const std::vector<T> &v) : array_(ArrayRef<T>(v)) {}
    OptionalArrayRef(const std::optional<ArrayRef<T>> &array) : array_(array) {}
    template <size_t N>
    OptionalArrayRef(const std::array<T, N> &a) : array_(ArrayRef<T>(a))
    {
    }
    bool has_value() const noexcept { return array_.has_value(); }
    explicit operator bool() const noexcept { return array_.has_value(); }
    const ArrayRef<T> &value() const { return array_.value(); }
    const ArrayRef<T> &operator*() const { return *array_; }
    const ArrayRef<T> *operator->() const { return &*array_; }

  private:
    std::optional<ArrayRef<T>> array_;
};

/* --- symbolic numbers: libtorch takes them, a compiled extension only has plain ones -------------------------------------------------- */

class C10_API SymInt
{
  public:
    SymInt() : data_(0) {}
    SymInt(int64_t value) : data_(value)
    {
        if (data_ < LIMIT)
            promote_to_negative();
    }
    SymInt(const SymInt &other) : data_(other.plain()) {}
    SymInt &operator=(const SymInt &other)
    {
        data_ = other.plain();
        return *this;
    }
    ~SymInt() {} /* not trivial, as torch's: it is passed by its address */
    int64_t guard_int(const char *, int64_t) const { return plain(); }
    int64_t expect_int() const { return plain(); }
    void promote_to_negative();

    static constexpr int64_t LIMIT = -(1LL << 62);

  private:
    int64_t plain() const
    {
        TORCH_CHECK(data_ >= LIMIT, "expected a plain number, got a symbolic one");
        return data_;
    }
    int64_t data_;
};

using SymIntArrayRef = ArrayRef<SymInt>;

inline SymIntArrayRef fromIntArrayRefSlow(IntArrayRef array)
{
    for (int64_t value : array)
        TORCH_CHECK(value >= SymInt::LIMIT,
                    "IntArrayRef contains an int that cannot be represented as a SymInt: ", value);
    return SymIntArrayRef(reinterpret_cast<const SymInt *>(array.data()), array.size());
}

/* --- Scalar ------------------------------------------------------------------------------------------------------------------------- */

class C10_API Scalar
{
  public:
    Scalar() : Scalar(int64_t(0)) {}
    Scalar(const Scalar &) = default;
    Scalar &operator=(const Scalar &) = default;
    ~Scalar() {} /* not trivial, as torch's */

    Scalar(uint8_t value) : tag(Tag::HAS_i) { v.i = value; }
    Scalar(int8_t value) : tag(Tag::HAS_i) { v.i = value; }
    Scalar(int16_t value) : tag(Tag::HAS_i) { v.i = value; }
    Scalar(uint16_t value) : tag(Tag::HAS_i) { v.i = value; }
    Scalar(int value) : tag(Tag::HAS_i) { v.i = value; }
    Scalar(uint32_t value) : tag(Tag::HAS_i) { v.i = value; }
    Scalar(int64_t value) : tag(Tag::HAS_i) { v.i = value; }
    Scalar(long long value) : tag(Tag::HAS_i) { v.i = value; }
    Scalar(uint64_t value) : tag(value > uint64_t(INT64_MAX) ? Tag::HAS_u : Tag::HAS_i) { v.u = value; }
    Scalar(float value) : tag(Tag::HAS_d) { v.d = value; }
    Scalar(double value) : tag(Tag::HAS_d) { v.d = value; }
    Scalar(Half value) : tag(Tag::HAS_d) { v.d = float(value); }
    Scalar(BFloat16 value) : tag(Tag::HAS_d) { v.d = float(value); }
    Scalar(c10::complex<float> value) : tag(Tag::HAS_z) { v.z = c10::complex<double>(value.real(), value.imag()); }
    Scalar(c10::complex<double> value) : tag(Tag::HAS_z) { v.z = value; }
    template <typename T, std::enable_if_t<std::is_same_v<T, bool>, bool> * = nullptr>
    Scalar(T value) : tag(Tag::HAS_b)
    {
        v.i = value;
    }
    Scalar(const SymInt &value) : Scalar(value.guard_int(__FILE__, __LINE__)) {}

    bool isFloatingPoint() const { return tag == Tag::HAS_d; }
    bool isComplex() const { return tag == Tag::HAS_z; }
    bool isBoolean() const { return tag == Tag::HAS_b; }
    bool isIntegral(bool include_bool) const
    {
        return tag == Tag::HAS_i || tag == Tag::HAS_u || (include_bool && isBoolean());
    }
    ScalarType type() const
    {
        switch (tag) {
        case Tag::HAS_z: return ScalarType::ComplexDouble;
        case Tag::HAS_d: return ScalarType::Double;
        case Tag::HAS_i: return ScalarType::Long;
        case Tag::HAS_u: return ScalarType::UInt64;
        case Tag::HAS_b: return ScalarType::Bool;
        }
        TORCH_CHECK(false, "Unknown scalar type.");
    }
    template <typename T>
    T to() const
    {
        return converted<T>("value");
    }

#define OPJIT_TO(type, name) \
    type to##name() const { return converted<type>(#type); }
    AT_FORALL_SCALAR_TYPES_WITH_COMPLEX(OPJIT_TO)
#undef OPJIT_TO
    SymInt toSymInt() const { return toLong(); }
    Scalar operator-() const;
    Scalar conj() const;
    Scalar log() const;

  private:
    enum class Tag { HAS_d, HAS_i, HAS_u, HAS_z, HAS_b };

    template <typename T>
    T converted(const char *name) const
    {
        switch (tag) {
        case Tag::HAS_d: return checked_convert<T, double>(v.d, name);
        case Tag::HAS_z: return checked_convert<T, c10::complex<double>>(v.z, name);
        case Tag::HAS_b: return checked_convert<T, bool>(v.i, name);
        case Tag::HAS_i: return checked_convert<T, int64_t>(v.i, name);
        case Tag::HAS_u: return checked_convert<T, uint64_t>(v.u, name);
        }
        TORCH_CHECK(false);
    }

    Tag tag;
    union Value {
        double d{};
        int64_t i;
        uint64_t u;
        c10::complex<double> z;
        void *p;
        Value() {}
    } v;
};

#define OPJIT_TO(type, name) \
    template <> \
    inline type Scalar::to<type>() const \
    { \
        return to##name(); \
    }
AT_FORALL_SCALAR_TYPES_WITH_COMPLEX(OPJIT_TO)
#undef OPJIT_TO

TORCH_API std::ostream &operator<<(std::ostream &out, const Scalar &scalar);

/* --- devices and options ------------------------------------------------------------------------------------------------------------- */

using torch::headeronly::DeviceType;
using DeviceIndex = int8_t;
C10_API std::string DeviceTypeName(DeviceType type, bool lower_case = false);
C10_API std::ostream &operator<<(std::ostream &out, DeviceType type);

struct C10_API Device final {
    using Type = DeviceType;
    Device(DeviceType type, DeviceIndex index = -1) : type_(type), index_(index) { validate(); }
    Device(const std::string &text);
    bool operator==(const Device &other) const noexcept { return type_ == other.type_ && index_ == other.index_; }
    bool operator!=(const Device &other) const noexcept { return !(*this == other); }
    DeviceIndex index() const noexcept { return index_; }
    bool has_index() const noexcept { return index_ != -1; }
    DeviceType type() const noexcept { return type_; }
    bool is_cuda() const noexcept { return type_ == DeviceType::CUDA; }
    bool is_cpu() const noexcept { return type_ == DeviceType::CPU; }
    bool is_meta() const noexcept { return type_ == DeviceType::Meta; }
    std::string str() const;

  private:
    DeviceType type_;
    DeviceIndex index_ = -1;
    void validate()
    {
        TORCH_INTERNAL_ASSERT_DEBUG_ONLY(index_ >= -1, "Device index must be -1 or non-negative, got ",
                                         static_cast<int>(index_));
        TORCH_INTERNAL_ASSERT_DEBUG_ONLY(!is_cpu() || index_ <= 0, "CPU device index must be -1 or zero, got ",
                                         static_cast<int>(index_));
    }
};
C10_API std::ostream &operator<<(std::ostream &out, const Device &device);

using StreamId = int64_t;
class C10_API Stream final
{
  public:
    enum Unsafe { UNSAFE };
    enum Default { DEFAULT };
    explicit Stream(Unsafe, Device device, StreamId id) : device_(device), id_(id) {}
    explicit Stream(Default, Device device) : device_(device), id_(0) {}
    bool operator==(const Stream &other) const noexcept { return device_ == other.device_ && id_ == other.id_; }
    bool operator!=(const Stream &other) const noexcept { return !(*this == other); }
    Device device() const noexcept { return device_; }
    DeviceType device_type() const noexcept { return device_.type(); }
    DeviceIndex device_index() const noexcept { return device_.index(); }
    StreamId id() const noexcept { return id_; }

  private:
    Device device_;
    StreamId id_;
};

} // namespace c10

namespace caffe2
{
inline namespace __attribute__((abi_tag("opjit"))) light
{

    /* A dtype as Tensor::dtype() returns it; it compares with torch::kFloat and its like. */
    class TypeMeta final
    {
      public:
        TypeMeta() : type_(c10::ScalarType::Undefined) {}
        TypeMeta(c10::ScalarType type) : type_(type) {}
        c10::ScalarType toScalarType() const { return type_; }
        operator c10::ScalarType() const { return type_; }
        size_t itemsize() const { return c10::elementSize(type_); }
        std::string name() const
        {
            switch (type_) {
            case c10::ScalarType::Byte: return "unsigned char";
            case c10::ScalarType::Char: return "signed char";
            case c10::ScalarType::Short: return "short int";
            case c10::ScalarType::Int: return "int";
            case c10::ScalarType::Long: return "long int";
            case c10::ScalarType::Float: return "float";
            case c10::ScalarType::Double: return "double";
            case c10::ScalarType::Bool: return "bool";
            case c10::ScalarType::UInt16: return "short unsigned int";
            case c10::ScalarType::UInt32: return "unsigned int";
            case c10::ScalarType::UInt64: return "long unsigned int";
            case c10::ScalarType::ComplexFloat: return "c10::complex<float>";
            case c10::ScalarType::ComplexDouble: return "c10::complex<double>";
            case c10::ScalarType::ComplexHalf: return "c10::complex<c10::Half>";
            case c10::ScalarType::Undefined: return "nullptr (uninitialized)";
            default: return std::string("c10::") + c10::toString(type_);
            }
        }
        static TypeMeta fromScalarType(c10::ScalarType type) { return type; }
        template <typename T>
        static TypeMeta Make()
        {
            return c10::CppTypeToScalarType<T>::value;
        }
        friend std::ostream &operator<<(std::ostream &out, TypeMeta type) { return out << type.name(); }
        friend bool operator==(TypeMeta a, TypeMeta b) { return a.type_ == b.type_; }
        friend bool operator!=(TypeMeta a, TypeMeta b) { return a.type_ != b.type_; }
        friend bool operator==(TypeMeta a, c10::ScalarType b) { return a.type_ == b; }
        friend bool operator!=(TypeMeta a, c10::ScalarType b) { return a.type_ != b; }
        friend bool operator==(c10::ScalarType a, TypeMeta b) { return a == b.type_; }
        friend bool operator!=(c10::ScalarType a, TypeMeta b) { return a != b.type_; }

      private:
        c10::ScalarType type_;
    };

} // namespace light
} // namespace caffe2

namespace c10
{

inline ScalarType typeMetaToScalarType(caffe2::TypeMeta type)
{
    return type.toScalarType();
}
inline caffe2::TypeMeta scalarTypeToTypeMeta(ScalarType type)
{
    return type;
}
inline caffe2::TypeMeta get_default_dtype()
{
    return get_default_dtype_as_scalartype();
}
inline std::optional<ScalarType> optTypeMetaToScalarType(std::optional<caffe2::TypeMeta> type)
{
    return type ? std::optional<ScalarType>(type->toScalarType()) : std::nullopt;
}

inline namespace __attribute__((abi_tag("opjit"))) light
{

    struct TensorOptions {
        TensorOptions() = default;
        TensorOptions(Layout layout) : layout_(layout) {}
        template <typename T, typename = std::enable_if_t<std::is_same_v<std::decay_t<T>, Device>>>
        TensorOptions(T &&device) : device_(device)
        {
        }
        TensorOptions(DeviceType type, DeviceIndex index = -1) : device_(Device(type, index)) {}
        TensorOptions(const char *device) : device_(Device(std::string(device))) {}
        TensorOptions(caffe2::TypeMeta dtype) : dtype_(dtype) {}
        TensorOptions(ScalarType dtype) : dtype_(dtype) {}
        TensorOptions(MemoryFormat format) : memory_format_(format) {}

#define OPJIT_SET(type, name, member) \
    [[nodiscard]] TensorOptions name(std::optional<type> value) const noexcept \
    { \
        TensorOptions changed = *this; \
        changed.member = value; \
        return changed; \
    }
        OPJIT_SET(Device, device, device_)
        OPJIT_SET(Layout, layout, layout_)
        OPJIT_SET(bool, requires_grad, requires_grad_)
        OPJIT_SET(bool, pinned_memory, pinned_memory_)
        OPJIT_SET(MemoryFormat, memory_format, memory_format_)
        OPJIT_SET(ScalarType, dtype, dtype_)
#undef OPJIT_SET
        template <typename... Args>
        [[nodiscard]] TensorOptions device(Args &&...args) const noexcept
        {
            return device(std::optional<Device>(std::in_place, std::forward<Args>(args)...));
        }
        [[nodiscard]] TensorOptions dtype(ScalarType type) const noexcept
        {
            return dtype(std::optional<ScalarType>(type));
        }
        [[nodiscard]] TensorOptions dtype(caffe2::TypeMeta type) const noexcept
        {
            return dtype(std::optional<ScalarType>(type.toScalarType()));
        }
        template <typename T>
        TensorOptions dtype() const
        {
            return dtype(std::optional<ScalarType>(CppTypeToScalarType<T>::value));
        }
        [[nodiscard]] TensorOptions device_index(DeviceIndex index) const noexcept
        {
            return device(Device(DeviceType::CUDA, index));
        }

        Device device() const noexcept
        {
            return device_.value_or(Device(kCPU));
        }
        Layout layout() const noexcept
        {
            return layout_.value_or(kStrided);
        }
        caffe2::TypeMeta dtype() const noexcept
        {
            return dtype_.value_or(get_default_dtype_as_scalartype());
        }
        bool requires_grad() const noexcept
        {
            return requires_grad_.value_or(false);
        }
        bool pinned_memory() const noexcept
        {
            return pinned_memory_.value_or(false);
        }
        bool has_device() const noexcept
        {
            return device_.has_value();
        }
        bool has_dtype() const noexcept
        {
            return dtype_.has_value();
        }
        bool has_layout() const noexcept
        {
            return layout_.has_value();
        }
        bool has_memory_format() const noexcept
        {
            return memory_format_.has_value();
        }
        bool has_requires_grad() const noexcept
        {
            return requires_grad_.has_value();
        }
        bool has_pinned_memory() const noexcept
        {
            return pinned_memory_.has_value();
        }
        bool is_sparse() const
        {
            return layout_ == Layout::Sparse;
        }
        std::optional<Device> device_opt() const noexcept
        {
            return device_;
        }
        std::optional<Layout> layout_opt() const noexcept
        {
            return layout_;
        }
        std::optional<caffe2::TypeMeta> dtype_opt() const noexcept
        {
            return dtype_ ? std::optional<caffe2::TypeMeta>(*dtype_) : std::nullopt;
        }
        std::optional<bool> pinned_memory_opt() const noexcept
        {
            return pinned_memory_;
        }
        std::optional<bool> requires_grad_opt() const noexcept
        {
            return requires_grad_;
        }
        std::optional<MemoryFormat> memory_format_opt() const noexcept
        {
            return memory_format_;
        }

        TensorOptions merge_in(TensorOptions other) const noexcept
        {
            TensorOptions merged = other;
            merged.device_ = other.device_ ? other.device_ : device_;
            merged.dtype_ = other.dtype_ ? other.dtype_ : dtype_;
            merged.layout_ = other.layout_ ? other.layout_ : layout_;
            merged.requires_grad_ = other.requires_grad_ ? other.requires_grad_ : requires_grad_;
            merged.pinned_memory_ = other.pinned_memory_ ? other.pinned_memory_ : pinned_memory_;
            merged.memory_format_ = other.memory_format_ ? other.memory_format_ : memory_format_;
            return merged;
        }

      private:
        std::optional<Device> device_;
        std::optional<ScalarType> dtype_;
        std::optional<Layout> layout_;
        std::optional<bool> requires_grad_, pinned_memory_;
        std::optional<MemoryFormat> memory_format_;
    };

} // namespace light

inline TensorOptions dtype(ScalarType dtype)
{
    return TensorOptions(dtype);
}
inline TensorOptions dtype(caffe2::TypeMeta dtype)
{
    return TensorOptions(dtype);
}
template <typename T>
inline TensorOptions dtype()
{
    return TensorOptions(CppTypeToScalarType<T>::value);
}
inline TensorOptions layout(Layout layout)
{
    return TensorOptions(layout);
}
inline TensorOptions device(Device device)
{
    return TensorOptions(device);
}
inline TensorOptions device_index(int16_t index)
{
    return TensorOptions().device_index(static_cast<DeviceIndex>(index));
}
inline TensorOptions requires_grad(bool requires_grad = true)
{
    return TensorOptions().requires_grad(requires_grad);
}
inline TensorOptions memory_format(MemoryFormat format)
{
    return TensorOptions(format);
}

namespace impl
{

inline std::optional<MemoryFormat> check_tensor_options_and_extract_memory_format(const TensorOptions &options,
                                                                                  std::optional<MemoryFormat> format)
{
    TORCH_CHECK(!options.requires_grad_opt().value_or(false),
                "Operators taking TensorOptions cannot take a TensorOptions with "
                "options.requires_grad set as true. This isn't implemented yet.");
    TORCH_CHECK(
        !(options.has_memory_format() && format.has_value()),
        "Cannot set memory_format both in TensorOptions and explicit argument; please delete the redundant setter.");
    return format.has_value() ? format : options.memory_format_opt();
}

} // namespace impl

/* --- arguments that only pass through ------------------------------------------------------------------------------------------------- */

struct C10_API GradMode {
    static bool is_enabled();
    static void set_enabled(bool enabled);
};

struct AutoGradMode {
    AutoGradMode(bool enabled) : before_(GradMode::is_enabled()) { GradMode::set_enabled(enabled); }
    AutoGradMode(const AutoGradMode &) = delete;
    ~AutoGradMode() { GradMode::set_enabled(before_); }

  private:
    bool before_;
};

struct NoGradGuard : AutoGradMode {
    NoGradGuard() : AutoGradMode(false) {}
};

enum class IListRefTag { Unboxed, Boxed, Materialized, None };

/* A list of tensors as torch::cat and torch::stack take it. */
template <typename T>
class IListRef
{
  public:
    IListRef() : tag_(IListRefTag::None) {}
    IListRef(const ArrayRef<T> &list) : IListRef(list.data(), list.size()) {}
    IListRef(const std::vector<T> &list) : IListRef(list.data(), list.size()) {}
    IListRef(const std::initializer_list<T> &list) : IListRef(list.begin(), list.size()) {}
    template <size_t N>
    IListRef(const std::array<T, N> &list) : IListRef(list.data(), N)
    {
    }
    IListRef(const T &one) : IListRef(&one, 1) {}

  private:
    IListRef(const T *data, size_t size) : tag_(IListRefTag::Unboxed)
    {
        payload_.unboxed.data = data;
        payload_.unboxed.size = size;
    }
    union Payload {
        const void *boxed;
        struct {
            const T *data;
            size_t size;
        } unboxed;
        const void *materialized;
        Payload() : boxed(nullptr) {}
    } payload_;
    IListRefTag tag_;
};

} // namespace c10

namespace at
{

using namespace c10;

/* No generator: torch's default one. Its layout is that of torch's empty handle. */
struct Generator {
    Generator() = default;
    ~Generator() {}

  private:
    void *impl_ = nullptr;
};

using TensorList = ArrayRef<Tensor>;
using ITensorListRef = IListRef<Tensor>;
using IOptTensorListRef = IListRef<OptionalTensorRef>;
using OptionalIntArrayRef = OptionalArrayRef<int64_t>;
using OptionalSymIntArrayRef = OptionalArrayRef<SymInt>;
using DimnameList = ArrayRef<Dimname>;

} // namespace at
