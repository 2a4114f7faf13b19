/*
 * opjit_bind.h - binds functions to Python with pybind11's names: PYBIND11_MODULE, m.def, py::arg.
 *
 * It holds the part of pybind11 that binds functions of numbers, strings, tensors and containers of them; programs that name anything else
 * are built with pybind11. Conversions, signatures and errors are those of pybind11 3. Python's headers take 0.2 s, so the functions of its
 * C interface that are needed are declared here. opjit_bind.cpp holds what is not a template; it is compiled once per compiler and torch.
 */
#pragma once

#include "opjit_tensor.h"

#include <complex>
#include <map>
#include <memory>
#include <stdexcept>
#include <unordered_map>

typedef struct _object PyObject;
typedef struct _typeobject PyTypeObject;
typedef ssize_t Py_ssize_t;

extern "C" {
struct OpjitMethodDef {
    const char *name;
    PyObject *(*function)(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names);
    int flags;
    const char *doc;
};
struct OpjitModuleDef {
    Py_ssize_t refcount;
    void *type, *init;
    Py_ssize_t index;
    PyObject *copy;
    const char *name, *doc;
    Py_ssize_t size;
    void *methods;
    struct Slot {
        int slot;
        void *value;
    } *slots;
    void *traverse, *clear, *free;
};
extern PyObject *PyExc_TypeError, *PyExc_RuntimeError, *PyExc_ValueError, *PyExc_IndexError, *PyExc_MemoryError,
    *PyExc_OverflowError;
extern PyObject _Py_NoneStruct, _Py_TrueStruct, _Py_FalseStruct;
void Py_IncRef(PyObject *);
void Py_DecRef(PyObject *);
PyObject *PyModuleDef_Init(struct OpjitModuleDef *);
PyObject *PyModule_GetNameObject(PyObject *);
PyObject *PyCFunction_NewEx(struct OpjitMethodDef *, PyObject *self, PyObject *module);
PyObject *PyCapsule_New(void *, const char *, void (*)(PyObject *));
void *PyCapsule_GetPointer(PyObject *, const char *);
int PyObject_SetAttrString(PyObject *, const char *, PyObject *);
PyObject *PyObject_GetAttrString(PyObject *, const char *);
int PyObject_IsInstance(PyObject *, PyObject *);
int PyObject_IsTrue(PyObject *);
PyObject *PyObject_Repr(PyObject *);
PyObject *PyNumber_Index(PyObject *);
PyObject *PyNumber_Long(PyObject *);
PyObject *PyNumber_Float(PyObject *);
int PyObject_HasAttrString(PyObject *, const char *);
int PyNumber_Check(PyObject *);
double PyFloat_AsDouble(PyObject *);
PyObject *PyFloat_FromDouble(double);
long PyLong_AsLong(PyObject *);
unsigned long PyLong_AsUnsignedLong(PyObject *);
PyObject *PyLong_FromLongLong(long long);
PyObject *PyLong_FromUnsignedLongLong(unsigned long long);
PyObject *PyBool_FromLong(long);
PyObject *PyComplex_FromDoubles(double, double);
PyObject *PyUnicode_FromStringAndSize(const char *, Py_ssize_t);
PyObject *PyUnicode_FromString(const char *);
const char *PyUnicode_AsUTF8AndSize(PyObject *, Py_ssize_t *);
int PyUnicode_CompareWithASCIIString(PyObject *, const char *);
int PyBytes_AsStringAndSize(PyObject *, char **, Py_ssize_t *);
char *PyByteArray_AsString(PyObject *);
int PySequence_Check(PyObject *);
PyObject *PyList_New(Py_ssize_t);
int PyList_SetItem(PyObject *, Py_ssize_t, PyObject *);
int PyList_Append(PyObject *, PyObject *);
PyObject *PyTuple_New(Py_ssize_t);
int PyTuple_SetItem(PyObject *, Py_ssize_t, PyObject *);
Py_ssize_t PyTuple_Size(PyObject *);
PyObject *PyTuple_GetItem(PyObject *, Py_ssize_t);
PyObject *PySequence_List(PyObject *);
Py_ssize_t PyObject_Size(PyObject *);
PyObject *PyList_GetItem(PyObject *, Py_ssize_t);
PyObject *PyDict_New(void);
int PyDict_SetItem(PyObject *, PyObject *, PyObject *);
PyObject *PyErr_Occurred(void);
void PyErr_Clear(void);
void PyErr_SetString(PyObject *, const char *);
int PyErr_ExceptionMatches(PyObject *);
extern PyTypeObject PyFloat_Type, PyLong_Type, PyUnicode_Type, PyBytes_Type, PyByteArray_Type;
extern PyTypeObject THPDtypeType, THPDeviceType;
void *PyEval_SaveThread(void);
void PyEval_RestoreThread(void *);
int PyGILState_Ensure(void);
void PyGILState_Release(int);
}

/* torch's own conversions, which libtorch_python exports. */
PyObject *THPDevice_New(const c10::Device &device);

/* Errors that libtorch_python throws and translates. Only their types matter here. */
struct __attribute__((visibility("default"))) python_error : std::exception {
};

namespace torch
{
struct __attribute__((visibility("default"))) PyTorchError : std::exception {
};
PyObject *opjit_dtype(c10::ScalarType dtype) __asm__("_ZN5torch11getTHPDtypeEN3c1010ScalarTypeE");
void translate_exception_to_python(const std::exception_ptr &error);
/* Turns warnings of a call into Python's. Only its constructor and its destructor are called; it is smaller than this. */
struct PyWarningHandler {
    PyWarningHandler() noexcept(true);
    ~PyWarningHandler() noexcept(false);
    alignas(16) char storage[256];
};
} // namespace torch

namespace pybind11
{

struct handle {
    PyObject *m_ptr = nullptr;
};
enum class return_value_policy : uint8_t {
    automatic,
    automatic_reference,
    take_ownership,
    copy,
    move,
    reference,
    reference_internal
};

namespace detail
{

template <typename T, typename = void>
struct type_caster;
template <>
struct TORCH_API type_caster<at::Tensor, void> {
    at::Tensor value;
    bool load(handle source, bool convert);
    static handle cast(const at::Tensor &tensor, return_value_policy policy, handle parent);
};
template <>
struct TORCH_API type_caster<c10::Scalar, void> {
    c10::Scalar value;
    bool load(handle source, bool convert);
    static handle cast(const c10::Scalar &scalar, return_value_policy policy, handle parent);
};

template <>
struct TORCH_API type_caster<at::IntArrayRef, void> {
    at::IntArrayRef value;
    bool load(handle source, bool convert);
    static handle cast(at::IntArrayRef numbers, return_value_policy policy, handle parent);

  private:
    std::vector<int64_t> numbers;
};

} // namespace detail

struct gil_scoped_release {
    gil_scoped_release() : state(PyEval_SaveThread()) {}
    gil_scoped_release(const gil_scoped_release &) = delete;
    ~gil_scoped_release() { PyEval_RestoreThread(state); }

  private:
    void *state;
};

struct gil_scoped_acquire {
    gil_scoped_acquire() : state(PyGILState_Ensure()) {}
    gil_scoped_acquire(const gil_scoped_acquire &) = delete;
    ~gil_scoped_acquire() { PyGILState_Release(state); }

  private:
    int state;
};

/* Picks one of several functions of one name: py::overload_cast<int, int>(add). */
template <typename... A>
struct overload_cast_of {
    template <typename R>
    constexpr auto operator()(R (*function)(A...)) const
    {
        return function;
    }
};
template <typename... A>
constexpr overload_cast_of<A...> overload_cast{};

/* An error that is already set in Python. */
struct error_already_set : std::exception {
    const char *what() const noexcept override { return "a Python error"; }
};

struct none {
};
template <typename... Guards>
struct call_guard {
    using Guard = std::tuple<Guards...>;
};

} // namespace pybind11

namespace py = pybind11;

namespace opjit
{

struct Function; /* of Python: a name and its overloads */

/* --- references and conversions ------------------------------------------------------------------------------------------------------- */

/* A reference to a Python object; null after an error, which Python holds. */
struct Object {
    PyObject *object;
    explicit Object(PyObject *owned = nullptr) : object(owned) {}
    Object(const Object &other) : object(other.object) { Py_IncRef(object); }
    Object(Object &&other) noexcept : object(std::exchange(other.object, nullptr)) {}
    Object &operator=(Object other) noexcept
    {
        std::swap(object, other.object);
        return *this;
    }
    ~Object() { Py_DecRef(object); }
    PyObject *take() { return std::exchange(object, nullptr); }
    explicit operator bool() const { return object != nullptr; }
};

inline Object borrowed(PyObject *object)
{
    Py_IncRef(object);
    return Object(object);
}

bool is_a(PyObject *object, PyTypeObject &type);
bool load_bool(PyObject *object, bool convert, bool *value);
bool load_signed(PyObject *object, bool convert, long *value);
bool load_unsigned(PyObject *object, bool convert, unsigned long *value);
bool load_double(PyObject *object, bool convert, double *value);
bool load_string(PyObject *object, std::string *value);
/* The items of a sequence or, if conversions are allowed, of a set, generator or view; null for anything else. */
Object items_of(PyObject *object, bool convert);
PyObject *new_none();
void translate(); /* Give Python the exception that is being handled, as pybind11 does. */

/* How a C++ type looks to Python: `in` and `out` are its names in signatures, load() reads it, make() gives a new reference. */
template <typename T, typename = void>
struct Cast;

template <>
struct Cast<at::Tensor> {
    at::Tensor value;
    static std::string in() { return "torch.Tensor"; }
    static std::string out() { return in(); }
    bool load(PyObject *object, bool convert)
    {
        py::detail::type_caster<at::Tensor> caster;
        bool loaded = caster.load({object}, convert);
        value = std::move(caster.value);
        return loaded;
    }
    static PyObject *make(const at::Tensor &tensor)
    {
        return py::detail::type_caster<at::Tensor>::cast(tensor, {}, {}).m_ptr;
    }
};

template <>
struct Cast<c10::Scalar> {
    c10::Scalar value;
    static std::string in() { return "Union[Number, torch.SymInt, torch.SymFloat, torch.SymBool]"; }
    static std::string out() { return in(); }
    bool load(PyObject *object, bool convert)
    {
        py::detail::type_caster<c10::Scalar> caster;
        bool loaded = caster.load({object}, convert);
        value = caster.value;
        return loaded;
    }
    static PyObject *make(const c10::Scalar &scalar)
    {
        return py::detail::type_caster<c10::Scalar>::cast(scalar, {}, {}).m_ptr;
    }
};

template <>
struct Cast<bool> {
    bool value;
    static std::string in() { return "bool"; }
    static std::string out() { return in(); }
    bool load(PyObject *object, bool convert) { return load_bool(object, convert, &value); }
    static PyObject *make(bool value) { return PyBool_FromLong(value); }
};

template <typename T>
struct Cast<T, std::enable_if_t<std::is_integral_v<T> && !std::is_same_v<T, char>>> {
    T value;
    static std::string in() { return "typing.SupportsInt | typing.SupportsIndex"; }
    static std::string out() { return "int"; }
    bool load(PyObject *object, bool convert)
    {
        std::conditional_t<std::is_signed_v<T>, long, unsigned long> read = 0;
        bool loaded;
        if constexpr (std::is_signed_v<T>)
            loaded = load_signed(object, convert, &read);
        else
            loaded = load_unsigned(object, convert, &read);
        value = static_cast<T>(read);
        return loaded && value == read;
    }
    static PyObject *make(T value)
    {
        return std::is_signed_v<T> ? PyLong_FromLongLong(value) : PyLong_FromUnsignedLongLong(value);
    }
};

template <typename T>
struct Cast<T, std::enable_if_t<std::is_floating_point_v<T>>> {
    T value;
    static std::string in() { return "typing.SupportsFloat | typing.SupportsIndex"; }
    static std::string out() { return "float"; }
    bool load(PyObject *object, bool convert)
    {
        double read;
        bool loaded = load_double(object, convert, &read);
        value = static_cast<T>(read);
        return loaded;
    }
    static PyObject *make(T value) { return PyFloat_FromDouble(value); }
};

template <>
struct Cast<std::string> {
    std::string value;
    static std::string in() { return "str"; }
    static std::string out() { return in(); }
    bool load(PyObject *object, bool) { return load_string(object, &value); }
    static PyObject *make(const std::string &text) { return PyUnicode_FromStringAndSize(text.data(), text.size()); }
};

template <typename T>
struct Cast<c10::complex<T>> {
    static std::string out() { return "complex"; }
    static PyObject *make(const c10::complex<T> &value) { return PyComplex_FromDoubles(value.real(), value.imag()); }
};

template <>
struct Cast<const char *> {
    std::string kept;
    const char *value = nullptr;
    static std::string in() { return "str"; }
    bool load(PyObject *object, bool convert)
    {
        Cast<std::string> text;
        if (object == &_Py_NoneStruct)
            return convert;
        bool loaded = text.load(object, convert);
        kept = std::move(text.value);
        value = kept.c_str();
        return loaded;
    }
    static std::string out() { return "str"; }
    static PyObject *make(const char *text) { return text ? PyUnicode_FromString(text) : new_none(); }
};

/* torch.dtype and torch.device hold theirs right after the head of a Python object. */
template <typename T, PyTypeObject &type>
struct Held {
    T value;
    bool load(PyObject *object, bool)
    {
        bool fits = is_a(object, type);
        if (fits)
            std::memcpy(static_cast<void *>(&value), reinterpret_cast<char *>(object) + 2 * sizeof(void *),
                        sizeof value);
        return fits;
    }
};
template <>
struct Cast<c10::ScalarType> : Held<c10::ScalarType, THPDtypeType> {
    static std::string in() { return "torch.dtype"; }
    static std::string out() { return in(); }
    static PyObject *make(c10::ScalarType dtype)
    {
        try {
            return borrowed(torch::opjit_dtype(dtype)).take();
        } catch (...) { /* pybind11 converts results outside of torch's translation of errors */
            translate();
            return nullptr;
        }
    }
};
template <>
struct Cast<c10::Device> : Held<c10::Device, THPDeviceType> {
    Cast() : Held{c10::Device(c10::kCPU)} {}
    static std::string in() { return "torch.device"; }
    static std::string out() { return in(); }
    static PyObject *make(const c10::Device &device) { return THPDevice_New(device); }
};

template <typename T>
struct Cast<std::optional<T>> {
    std::optional<T> value;
    static std::string in() { return Cast<T>::in() + " | None"; }
    static std::string out() { return Cast<T>::out() + " | None"; }
    bool load(PyObject *object, bool convert)
    {
        if (object == &_Py_NoneStruct)
            return true;
        Cast<T> inner;
        bool loaded = inner.load(object, convert);
        if (loaded)
            value = std::move(inner.value);
        return loaded;
    }
    static PyObject *make(const std::optional<T> &value) { return value ? Cast<T>::make(*value) : new_none(); }
};

template <typename T>
struct Cast<std::vector<T>> {
    std::vector<T> value;
    static std::string in() { return "collections.abc.Sequence[" + Cast<T>::in() + "]"; }
    static std::string out() { return "list[" + Cast<T>::out() + "]"; }
    bool load(PyObject *object, bool convert)
    {
        Object items = items_of(object, convert);
        Py_ssize_t size = items ? PyObject_Size(items.object) : -1;
        for (Py_ssize_t i = 0; i < size; i++) {
            Cast<T> item;
            if (!item.load(PyList_GetItem(items.object, i), convert))
                return false;
            value.push_back(std::move(item.value));
        }
        return size >= 0;
    }
    static PyObject *make(const std::vector<T> &values)
    {
        Object list(PyList_New(values.size()));
        for (size_t i = 0; list && i < values.size(); i++) {
            PyObject *item = Cast<T>::make(values[i]);
            if (!item)
                return nullptr;
            PyList_SetItem(list.object, i, item);
        }
        return list.take();
    }
};

template <>
struct Cast<at::IntArrayRef> {
    py::detail::type_caster<at::IntArrayRef> caster;
    at::IntArrayRef value;
    static std::string in() { return "Tuple[int, ...]"; }
    static std::string out() { return in(); }
    bool load(PyObject *object, bool convert)
    {
        bool loaded = caster.load({object}, convert);
        value = caster.value;
        return loaded;
    }
    static PyObject *make(at::IntArrayRef values)
    {
        return py::detail::type_caster<at::IntArrayRef>::cast(values, {}, {}).m_ptr;
    }
};

template <typename T, size_t N>
struct Cast<std::array<T, N>> {
    std::array<T, N> value;
    static std::string in()
    {
        return "typing.Annotated[collections.abc.Sequence[" + Cast<T>::in() + "], \"FixedSize(" + std::to_string(N) +
               ")\"]";
    }
    static std::string out()
    {
        return "typing.Annotated[list[" + Cast<T>::out() + "], \"FixedSize(" + std::to_string(N) + ")\"]";
    }
    bool load(PyObject *object, bool convert)
    {
        Cast<std::vector<T>> list;
        if (!list.load(object, convert) || list.value.size() != N)
            return false;
        for (size_t i = 0; i < N; i++)
            value[i] = std::move(list.value[i]);
        return true;
    }
    static PyObject *make(const std::array<T, N> &values)
    {
        return Cast<std::vector<T>>::make({values.begin(), values.end()});
    }
};

template <typename T, typename... Ts>
std::string joined(std::string (*)(), T first, Ts... rest)
{
    std::string text = first();
    ((text += ", " + rest()), ...);
    return text;
}

template <template <typename...> class Tuple, typename... Ts>
struct CastTuple {
    Tuple<Ts...> value;
    bool load(PyObject *object, bool convert)
    {
        Object items = items_of(object, convert);
        return items && PySequence_Check(object) && PyObject_Size(items.object) == sizeof...(Ts) &&
               load_each(items.object, convert, std::index_sequence_for<Ts...>());
    }
    template <size_t... I>
    bool load_each(PyObject *items, bool convert, std::index_sequence<I...>)
    {
        std::tuple<Cast<Ts>...> casts;
        bool loaded = (std::get<I>(casts).load(PyList_GetItem(items, I), convert) && ...);
        if (loaded)
            value = Tuple<Ts...>(std::move(std::get<I>(casts).value)...);
        return loaded;
    }
    static std::string in() { return "tuple[" + joined(nullptr, Cast<Ts>::in...) + "]"; }
    static std::string out() { return "tuple[" + joined(nullptr, Cast<Ts>::out...) + "]"; }
    template <size_t... I>
    static PyObject *make_each(const Tuple<Ts...> &values, std::index_sequence<I...>)
    {
        Object made[] = {Object(Cast<Ts>::make(std::get<I>(values)))...};
        Object tuple(PyTuple_New(sizeof...(Ts)));
        for (size_t i = 0; i < sizeof...(Ts); i++)
            if (!tuple || !made[i] || PyTuple_SetItem(tuple.object, i, made[i].take()) != 0)
                return nullptr;
        return tuple.take();
    }
    static PyObject *make(const Tuple<Ts...> &values) { return make_each(values, std::index_sequence_for<Ts...>()); }
};
template <typename... Ts>
struct Cast<std::tuple<Ts...>> : CastTuple<std::tuple, Ts...> {
};
template <typename A, typename B>
struct Cast<std::pair<A, B>> : CastTuple<std::pair, A, B> {
};

template <typename Map>
struct CastMap {
    static std::string out()
    {
        return "dict[" + Cast<typename Map::key_type>::out() + ", " + Cast<typename Map::mapped_type>::out() + "]";
    }
    static PyObject *make(const Map &map)
    {
        Object dict(PyDict_New());
        for (const auto &[key, value] : map) {
            Object made_key(Cast<typename Map::key_type>::make(key)),
                made(Cast<typename Map::mapped_type>::make(value));
            if (!dict || !made_key || !made || PyDict_SetItem(dict.object, made_key.object, made.object) != 0)
                return nullptr;
        }
        return dict.take();
    }
};
template <typename K, typename V>
struct Cast<std::map<K, V>> : CastMap<std::map<K, V>> {
};
template <typename K, typename V>
struct Cast<std::unordered_map<K, V>> : CastMap<std::unordered_map<K, V>> {
};

template <>
struct Cast<std::nullopt_t> {
    static PyObject *make(std::nullopt_t) { return new_none(); }
};
template <>
struct Cast<py::none> {
    static PyObject *make(py::none) { return new_none(); }
};

/* --- functions ------------------------------------------------------------------------------------------------------------------------- */

struct Argument {
    std::string name;
    Object value; /* its default, or null */
};

/* One function of C++ among those of one name. */
struct Overload {
    std::string signature, doc;
    std::vector<Argument> arguments;
    bool named = false;
    bool torch_errors = false; /* errors and warnings arrive as torch's own functions give them */
    std::shared_ptr<const void> function;
    PyObject *(*call)(const void *function, PyObject *const *args,
                      bool convert); /* no_match() if an argument does not convert */
};

inline PyObject *no_match()
{
    return reinterpret_cast<PyObject *>(1);
}

/* Name the arguments and write the signature; `types` has one for each argument, and the result's. */
void sign(Overload &overload, const std::vector<std::string> &types);

template <typename R>
struct Result {
    static std::string name() { return Cast<std::decay_t<R>>::out(); }
    template <typename F>
    static PyObject *of(F &&function)
    {
        return Cast<std::decay_t<R>>::make(function());
    }
};
template <>
struct Result<void> {
    static std::string name() { return "None"; }
    template <typename F>
    static PyObject *of(F &&function)
    {
        function();
        return new_none();
    }
};

template <typename A>
A &&passed(Cast<std::decay_t<A>> &cast)
{
    return static_cast<A &&>(cast.value);
}

/* Runs a function without Python's lock if a guard says so, and makes its result with the lock. */
template <typename Guard, typename R, typename F>
auto guarded(F &&function)
{
    if constexpr (std::is_void_v<R>) {
        Guard guard;
        function();
    } else {
        auto run = [&]() -> R {
            Guard guard;
            return function();
        };
        return run();
    }
}

template <typename Guard, typename R, typename... A, typename F, size_t... I>
PyObject *invoke(const F &function, PyObject *const *args, bool convert, std::index_sequence<I...>)
{
    [[maybe_unused]] std::tuple<Cast<std::decay_t<A>>...> casts;
    if (!(std::get<I>(casts).load(args[I], convert) && ...))
        return no_match();
    return Result<R>::of([&]() -> R {
        if constexpr (std::is_void_v<Guard>)
            return function(passed<A>(std::get<I>(casts))...);
        else
            return guarded<Guard, R>([&]() -> R { return function(passed<A>(std::get<I>(casts))...); });
    });
}

/* torch::wrap_pybind_function: errors and warnings as torch's own functions give them. */
template <typename F, bool no_gil>
struct Wrapped {
    F function;
};

template <typename Guard, typename R, typename... A, typename F>
void bind(Overload &overload, F function)
{
    sign(overload, {Cast<std::decay_t<A>>::in()..., Result<R>::name()});
    overload.function = std::make_shared<F>(std::move(function));
    overload.call = [](const void *bound, PyObject *const *args, bool convert) {
        return invoke<Guard, R, A...>(*static_cast<const F *>(bound), args, convert, std::index_sequence_for<A...>());
    };
}

template <typename Guard, typename R, typename... A>
void bind_any(Overload &overload, R (*function)(A...))
{
    bind<Guard, R, A...>(overload, function);
}
template <typename Guard, typename F, typename R, typename... A>
void bind_object(Overload &overload, const F &function, R (F::*)(A...) const)
{
    bind<Guard, R, A...>(overload, function);
}
template <typename Guard, typename F, typename = decltype(&F::operator())>
void bind_any(Overload &overload, const F &function)
{
    bind_object<Guard>(overload, function, &F::operator());
}
template <typename Guard, typename F, bool no_gil>
void bind_any(Overload &overload, const Wrapped<F, no_gil> &wrapped)
{
    overload.torch_errors = true;
    bind_any<std::conditional_t<no_gil, py::gil_scoped_release, Guard>>(overload, wrapped.function);
}

} // namespace opjit

namespace torch
{
template <typename F>
opjit::Wrapped<std::decay_t<F>, false> wrap_pybind_function(F &&function)
{
    return {std::forward<F>(function)};
}
template <typename F>
opjit::Wrapped<std::decay_t<F>, true> wrap_pybind_function_no_gil(F &&function)
{
    return {std::forward<F>(function)};
}
} // namespace torch

/* --- pybind11's names -------------------------------------------------------------------------------------------------------------------- */

namespace pybind11
{

struct arg_v {
    std::string name;
    opjit::Object value;
};
struct arg {
    explicit arg(const char *name) : name(name) {}
    template <typename T>
    arg_v operator=(T &&value) const
    {
        using Plain = std::decay_t<T>;
        return {name, opjit::Object(opjit::Cast<Plain>::make(value))};
    }
    arg &noconvert(bool = true) = delete; /* left to pybind11 */
    std::string name;
};

class module_
{
  public:
    explicit module_(PyObject *module) : module_object(opjit::borrowed(module)) {}

    template <typename F, typename... Extra>
    module_ &def(const char *name, F &&function, const Extra &...extra)
    {
        opjit::Overload overload;
        (note(overload, extra), ...);
        opjit::bind_any<typename Guard<Extra...>::type>(overload, std::forward<F>(function));
        add(name, std::move(overload));
        return *this;
    }

    struct Attribute {
        module_ &owner;
        std::string name;
        template <typename T>
        void operator=(T &&value)
        {
            owner.set(name.c_str(), opjit::Object(opjit::Cast<std::decay_t<T>>::make(value)));
        }
    };
    Attribute attr(const char *name) { return {*this, name}; }
    Attribute doc() { return {*this, "__doc__"}; }

  private:
    template <typename... Extra>
    struct Guard {
        using type = void;
    };
    template <typename G, typename... Extra>
    struct Guard<call_guard<G>, Extra...> {
        using type = G;
    };
    template <typename E, typename... Extra>
    struct Guard<E, Extra...> : Guard<Extra...> {
    };

    static void note(opjit::Overload &overload, const char *doc) { overload.doc = doc; }
    static void note(opjit::Overload &overload, const arg &a)
    {
        overload.named = true;
        overload.arguments.push_back({a.name, opjit::Object()});
    }
    static void note(opjit::Overload &overload, const arg_v &a)
    {
        overload.named = true;
        overload.arguments.push_back({a.name, a.value});
    }
    static void note(opjit::Overload &, return_value_policy) {}
    template <typename G>
    static void note(opjit::Overload &, call_guard<G>)
    {
    } /* several are left to pybind11 */

    void set(const char *name, const opjit::Object &value);
    void add(const char *name, opjit::Overload overload);

    opjit::Object module_object;
    std::shared_ptr<std::vector<opjit::Function *>> functions =
        std::make_shared<std::vector<opjit::Function *>>(); /* Python owns them */
};
using module = module_;

} // namespace pybind11

namespace opjit
{

int filled(PyObject *module, void (*fill)(py::module_ &));

} // namespace opjit

#define OPJIT_MODULE(name, variable) \
    static void opjit_fill_##name(py::module_ &variable); \
    static int opjit_exec_##name(PyObject *module) \
    { \
        return opjit::filled(module, opjit_fill_##name); \
    } \
    extern "C" __attribute__((visibility("default"))) PyObject *PyInit_##name() \
    { \
        static OpjitModuleDef::Slot slots[] = {{2 /* Py_mod_exec */, reinterpret_cast<void *>(opjit_exec_##name)}, \
                                               {0, nullptr}}; \
        static OpjitModuleDef definition = {1, nullptr, nullptr, 0,       nullptr, #name,  nullptr, \
                                            0, nullptr, slots,   nullptr, nullptr, nullptr}; \
        return PyModuleDef_Init(&definition); \
    } \
    static void opjit_fill_##name(py::module_ &variable)
#define PYBIND11_MODULE(name, variable, ...) OPJIT_MODULE(name, variable)
