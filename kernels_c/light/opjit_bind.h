/*
 * opjit_bind.h - binds functions to Python with pybind11's names: PYBIND11_MODULE, m.def, py::arg.
 *
 * pybind11's templates cost a compiler three seconds or more. Here a program's side is small, and pybind11 itself does
 * the work behind it: opjit_bind.cpp, compiled once per compiler and torch, holds its conversions, its signatures and
 * its calls. The types of a function's arguments and results must be in `Known` and containers of them. Programs with
 * other types are compiled with the headers of pybind11.
 */
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

typedef struct _object PyObject;

namespace opjit
{

/* --- implemented by opjit_bind.cpp with code of pybind11 and torch
 * ----------------------------------------------------------------------- */

template <typename T, typename... Ts>
constexpr bool is_one_of = (std::is_same_v<T, Ts> || ...);
template <typename T>
constexpr bool is_known = is_one_of<T, at::Tensor, at::Scalar, at::ScalarType, at::Device, at::Layout, at::MemoryFormat,
                                    std::string, bool, signed char, unsigned char, short, unsigned short, int,
                                    unsigned int, long, unsigned long, long long, unsigned long long, float, double>;

/* A type that pybind11 converts: load() fills a value, make() gives a new reference, name() is for signatures. */
template <typename T>
struct Known {
    static bool load(PyObject *object, bool convert, T *value);
    static PyObject *make(const T &value);
    static std::string name();
};

/* References to Python's objects. */
struct Objects {
    std::vector<PyObject *> all;
    explicit Objects(std::vector<PyObject *> owned = {}) : all(std::move(owned)) {}
    Objects(const Objects &) = delete;
    ~Objects();
    PyObject *list();
    PyObject *tuple();
    PyObject *dict(); /* of keys and values by turns */
};
bool load_int_array(PyObject *object, bool convert, std::vector<int64_t> *values); /* at::IntArrayRef */
bool load_text(PyObject *object, bool convert, std::optional<std::string> *text);  /* const char *, which may be null */
bool load_list(PyObject *object, bool convert, Objects *items);
bool load_tuple(PyObject *object, Objects *items);
bool is_none(PyObject *object);
PyObject *new_none();
PyObject *make_complex(double real, double imaginary);
PyObject *make_int_array(at::IntArrayRef values);
std::string int_array_name();
enum class Container { list, tuple, optional, map, array };
std::string container_name(Container kind, const std::vector<std::string> &inner, size_t size = 0);
void run_as_torch(void (*run)(void *), void *context);

struct Argument {
    std::string name;
    std::shared_ptr<PyObject> value; /* its default, or null */
};
/* A function as pybind11 gets it. */
struct Bound {
    std::string name, doc, signature;
    bool documented = false;
    size_t count = 0;
    std::vector<Argument> arguments;
    std::shared_ptr<const void> function;
    PyObject *(*call)(const void *function, PyObject *const *args, const bool *convert) = nullptr;
};
constexpr size_t most_arguments = 64;
inline PyObject *no_match()
{
    return reinterpret_cast<PyObject *>(1);
}
void define(PyObject *module, Bound bound);
void set_attribute(PyObject *module, const char *name, PyObject *value);
std::shared_ptr<PyObject> owned(PyObject *object); /* throws Python's error if there is no object */
PyObject *new_module(const char *name, void (*fill)(PyObject *module));

/* --- conversions ------------------------------------------------------------------------------------------------------------------------- */

template <typename T>
struct Cast {
    static_assert(is_known<T>, "opjit's binding does not know a type");
    T value = initial();
    static T initial()
    {
        if constexpr (std::is_same_v<T, at::Device>)
            return at::Device(at::kCPU);
        else
            return T();
    }
    T &held() { return value; }
    static std::string name() { return Known<T>::name(); }
    bool load(PyObject *object, bool convert) { return Known<T>::load(object, convert, &value); }
    static PyObject *make(const T &value) { return Known<T>::make(value); }
};

template <>
struct Cast<const char *> {
    std::optional<std::string> text;
    const char *value = nullptr;
    const char *&held() { return value; }
    static std::string name() { return Known<std::string>::name(); }
    bool load(PyObject *object, bool convert)
    {
        bool loaded = load_text(object, convert, &text);
        value = text ? text->c_str() : nullptr;
        return loaded;
    }
    static PyObject *make(const char *text) { return text ? Known<std::string>::make(text) : new_none(); }
};

template <>
struct Cast<at::IntArrayRef> {
    std::vector<int64_t> values;
    at::IntArrayRef value;
    at::IntArrayRef &held() { return value; }
    static std::string name() { return int_array_name(); }
    bool load(PyObject *object, bool convert)
    {
        bool loaded = load_int_array(object, convert, &values);
        value = values;
        return loaded;
    }
    static PyObject *make(at::IntArrayRef values) { return make_int_array(values); }
};

template <typename T>
struct Cast<c10::complex<T>> {
    static std::string name() { return "complex"; }
    static PyObject *make(const c10::complex<T> &value) { return make_complex(value.real(), value.imag()); }
};

template <>
struct Cast<std::nullopt_t> {
    static PyObject *make(std::nullopt_t) { return new_none(); }
};

template <typename T>
struct Cast<std::optional<T>> {
    std::optional<T> value;
    std::optional<T> &held() { return value; }
    static std::string name() { return container_name(Container::optional, {Cast<T>::name()}); }
    bool load(PyObject *object, bool convert)
    {
        if (is_none(object))
            return true;
        Cast<T> inner;
        bool loaded = inner.load(object, convert);
        if (loaded)
            value.emplace(std::move(inner.held()));
        return loaded;
    }
    static PyObject *make(const std::optional<T> &value) { return value ? Cast<T>::make(*value) : new_none(); }
};

template <typename T>
struct CastList {
    std::vector<T> value;
    std::vector<T> &held() { return value; }
    static std::string name() { return container_name(Container::list, {Cast<T>::name()}); }
    bool load(PyObject *object, bool convert)
    {
        Objects items;
        if (!load_list(object, convert, &items))
            return false;
        for (PyObject *item : items.all) {
            Cast<T> one;
            if (!one.load(item, convert))
                return false;
            value.push_back(std::move(one.held()));
        }
        return true;
    }
    template <typename List>
    static PyObject *make(const List &values)
    {
        Objects items;
        for (const auto &value : values)
            items.all.push_back(Cast<T>::make(value));
        return items.list();
    }
};
template <typename T>
struct Cast<std::vector<T>> : CastList<T> {
};
template <typename T, size_t N>
struct Cast<std::array<T, N>> {
    std::array<T, N> value;
    std::array<T, N> &held() { return value; }
    static std::string name() { return container_name(Container::array, {Cast<T>::name()}, N); }
    bool load(PyObject *object, bool convert)
    {
        CastList<T> list;
        if (!list.load(object, convert) || list.value.size() != N)
            return false;
        std::move(list.value.begin(), list.value.end(), value.begin());
        return true;
    }
    static PyObject *make(const std::array<T, N> &values) { return CastList<T>::make(values); }
};

template <typename Tuple, typename... Ts>
struct CastTuple {
    std::tuple<Cast<Ts>...> casts;
    std::optional<Tuple> value;
    Tuple &held() { return *value; }
    static std::string name() { return container_name(Container::tuple, {Cast<Ts>::name()...}); }
    bool load(PyObject *object, bool convert)
    {
        Objects items;
        return load_tuple(object, &items) && items.all.size() == sizeof...(Ts) &&
               load_each(items, convert, std::index_sequence_for<Ts...>());
    }
    template <size_t... I>
    bool load_each(const Objects &items, bool convert, std::index_sequence<I...>)
    {
        if (!(std::get<I>(casts).load(items.all[I], convert) && ...))
            return false;
        value.emplace(std::move(std::get<I>(casts).held())...);
        return true;
    }
    static PyObject *make(const Tuple &values)
    {
        Objects items;
        std::apply([&](const Ts &...each) { (items.all.push_back(Cast<Ts>::make(each)), ...); },
                   std::tuple<const Ts &...>(values));
        return items.tuple();
    }
};
template <typename... Ts>
struct Cast<std::tuple<Ts...>> : CastTuple<std::tuple<Ts...>, Ts...> {
};
template <typename A, typename B>
struct Cast<std::pair<A, B>> : CastTuple<std::pair<A, B>, A, B> {
};

template <typename Map>
struct CastMap { /* only as a result */
    using K = typename Map::key_type;
    using V = typename Map::mapped_type;
    static std::string name() { return container_name(Container::map, {Cast<K>::name(), Cast<V>::name()}); }
    static PyObject *make(const Map &map)
    {
        Objects items;
        for (const auto &[key, value] : map) {
            items.all.push_back(Cast<K>::make(key));
            items.all.push_back(Cast<V>::make(value));
        }
        return items.dict();
    }
};
template <typename K, typename V>
struct Cast<std::map<K, V>> : CastMap<std::map<K, V>> {
};
template <typename K, typename V>
struct Cast<std::unordered_map<K, V>> : CastMap<std::unordered_map<K, V>> {
};

/* --- calls ------------------------------------------------------------------------------------------------------------------------------- */

template <typename R>
struct Result {
    using T = std::decay_t<R>;
    static std::string name() { return Cast<T>::name(); }
};
template <>
struct Result<void> {
    static std::string name() { return "None"; }
};

struct NoGuard {
    ~NoGuard() {}
};
template <typename Guard, typename R, typename... A, typename F, size_t... I>
PyObject *invoke(const F &function, PyObject *const *args, const bool *convert, std::index_sequence<I...>)
{
    [[maybe_unused]] std::tuple<Cast<std::decay_t<A>>...> casts;
    if (!(std::get<I>(casts).load(args[I], convert[I]) && ...))
        return no_match();
    auto run = [&]() -> R {
        Guard guard;
        return function(static_cast<A &&>(std::get<I>(casts).held())...);
    };
    if constexpr (std::is_void_v<R>) {
        run();
        return new_none();
    } else {
        return Cast<std::decay_t<R>>::make(run());
    }
}

/* The parameters and the result of a function, or of an object with one operator(). */
template <typename F>
struct Signature : Signature<decltype(&F::operator())> {
};
template <typename R, typename... A>
struct Signature<R (*)(A...)> {
    template <typename Guard, typename F>
    static void bind(Bound &bound, F function)
    {
        static_assert(sizeof...(A) <= most_arguments, "opjit's binding does not know a type");
        std::string text;
        ((text += (text.empty() ? "({" : ", {") + Cast<std::decay_t<A>>::name() + "}"), ...);
        bound.signature = (text.empty() ? "(" : text) + ") -> " + Result<R>::name();
        bound.count = sizeof...(A);
        bound.function = std::make_shared<F>(std::move(function));
        bound.call = [](const void *known, PyObject *const *args, const bool *convert) {
            return invoke<Guard, R, A...>(*static_cast<const F *>(known), args, convert,
                                          std::index_sequence_for<A...>());
        };
    }
    template <typename F, typename Around>
    static auto wrapped(F function, Around)
    {
        return [function](A... args) -> R {
            if constexpr (std::is_void_v<R>) {
                auto run = [&] {
                    Around around;
                    function(std::forward<A>(args)...);
                };
                run_as_torch([](void *context) { (*static_cast<decltype(run) *>(context))(); }, &run);
            } else {
                std::optional<std::conditional_t<std::is_reference_v<R>, std::remove_reference_t<R> *, R>> result;
                auto run = [&] {
                    Around around;
                    if constexpr (std::is_reference_v<R>)
                        result.emplace(&function(std::forward<A>(args)...));
                    else
                        result.emplace(function(std::forward<A>(args)...));
                };
                run_as_torch([](void *context) { (*static_cast<decltype(run) *>(context))(); }, &run);
                if constexpr (std::is_reference_v<R>)
                    return **result;
                else
                    return std::move(*result);
            }
        };
    }
};
template <typename R, typename... A>
struct Signature<R (*)(A...) noexcept> : Signature<R (*)(A...)> {
};
template <typename C, typename R, typename... A>
struct Signature<R (C::*)(A...) const> : Signature<R (*)(A...)> {
};

/* --- pybind11's names -------------------------------------------------------------------------------------------------------------------- */

namespace binding
{

struct gil_scoped_release {
    gil_scoped_release();
    gil_scoped_release(const gil_scoped_release &) = delete;
    ~gil_scoped_release();

  private:
    void *state;
};
struct gil_scoped_acquire {
    gil_scoped_acquire();
    gil_scoped_acquire(const gil_scoped_acquire &) = delete;
    ~gil_scoped_acquire();

  private:
    void *state;
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

template <typename G>
struct call_guard {
};
struct arg {
    explicit arg(const char *name) : known{name, nullptr} {}
    template <typename T>
    arg operator=(T &&value) const
    {
        arg with_default(*this);
        with_default.known.value = owned(Cast<std::decay_t<T>>::make(value));
        return with_default;
    }
    Argument known;
};

class module_
{
  public:
    explicit module_(PyObject *module) : module(module) {}

    template <typename F, typename... Extra>
    module_ &def(const char *name, F &&function, const Extra &...extra)
    {
        Bound bound;
        bound.name = name;
        (note(bound, extra), ...);
        Signature<std::decay_t<F>>::template bind<typename Guard<Extra...>::type>(bound, std::decay_t<F>(function));
        define(module, std::move(bound));
        return *this;
    }

    struct Attribute {
        PyObject *module;
        std::string name;
        template <typename T>
        void operator=(T &&value)
        {
            set_attribute(module, name.c_str(), Cast<std::decay_t<T>>::make(value));
        }
    };
    Attribute attr(const char *name) { return {module, name}; }
    Attribute doc() { return {module, "__doc__"}; }

  private:
    template <typename... Extra>
    struct Guard {
        using type = NoGuard;
    };
    template <typename G, typename... Extra>
    struct Guard<call_guard<G>, Extra...> {
        using type = G;
    };
    template <typename E, typename... Extra>
    struct Guard<E, Extra...> : Guard<Extra...> {
    };

    static void note(Bound &bound, const char *doc)
    {
        bound.doc = doc;
        bound.documented = true;
    }
    static void note(Bound &bound, const arg &argument) { bound.arguments.push_back(argument.known); }
    template <typename G>
    static void note(Bound &, call_guard<G>)
    {
    }

    PyObject *module;
};
using module = module_;

} // namespace binding
} // namespace opjit

#ifndef OPJIT_BEHIND_BINDING /* pybind11 itself */
namespace pybind11
{
using namespace opjit::binding;
}
namespace py = pybind11;

namespace torch
{
template <typename F>
auto wrap_pybind_function(F &&function)
{
    return opjit::Signature<std::decay_t<F>>::wrapped(std::decay_t<F>(function), opjit::NoGuard());
}
} // namespace torch

#define OPJIT_MODULE(name, variable) \
    static void opjit_fill_##name(py::module_ &variable); \
    extern "C" __attribute__((visibility("default"))) PyObject *PyInit_##name() \
    { \
        return opjit::new_module(#name, [](PyObject *module) { \
            py::module_ wrapped(module); \
            opjit_fill_##name(wrapped); \
        }); \
    } \
    static void opjit_fill_##name(py::module_ &variable)
#define PYBIND11_MODULE(name, variable, ...) OPJIT_MODULE(name, variable)
#endif
