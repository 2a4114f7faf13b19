/*
 * opjit_bind.cpp - opjit_bind.h's side of pybind11: compiled once per compiler and torch, with torch's full headers.
 *
 * Nothing is retyped here: conversions, names and calls are pybind11's, errors and tensors torch's. If this file does
 * not compile with some version of torch, programs are compiled with torch/extension.h.
 */
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/Exceptions.h>

#define OPJIT_BEHIND_BINDING
#include "opjit_bind.h"

namespace pyb = ::pybind11;

namespace opjit
{

/* --- conversions ------------------------------------------------------------------------------------------------------------------------- */

template <typename T>
using Caster = pyb::detail::make_caster<T>;

template <typename T>
bool Known<T>::load(PyObject *object, bool convert, T *value)
{
    Caster<T> caster;
    if (!caster.load(object, convert))
        return false;
    *value = pyb::detail::cast_op<T>(std::move(caster));
    return true;
}
template <typename T>
PyObject *Known<T>::make(const T &value)
{
    return Caster<T>::cast(value, pyb::return_value_policy::copy, {}).ptr();
}
template <typename T>
std::string Known<T>::name()
{
    return Caster<T>::name.text;
}
#define KNOWN(T) template struct Known<T>;
KNOWN(at::Tensor)
KNOWN(at::Scalar)
KNOWN(at::ScalarType)
KNOWN(at::Device)
KNOWN(at::Layout)
KNOWN(at::MemoryFormat)
KNOWN(std::string)
KNOWN(bool)
KNOWN(signed char)
KNOWN(unsigned char)
KNOWN(short)
KNOWN(unsigned short)
KNOWN(int)
KNOWN(unsigned int)
KNOWN(long)
KNOWN(unsigned long)
KNOWN(long long)
KNOWN(unsigned long long)
KNOWN(float)
KNOWN(double)

bool load_int_array(PyObject *object, bool convert, std::vector<int64_t> *values)
{
    Caster<at::IntArrayRef> caster;
    if (!caster.load(object, convert))
        return false;
    *values = static_cast<at::IntArrayRef &>(caster).vec();
    return true;
}

bool load_text(PyObject *object, bool convert, std::optional<std::string> *text)
{
    Caster<char> caster;
    if (!caster.load(object, convert))
        return false;
    if (const char *letters = static_cast<char *>(caster))
        *text = letters;
    return true;
}

bool load_list(PyObject *object, bool convert, Objects *items)
{
    Caster<std::vector<pyb::object>> caster;
    if (!caster.load(object, convert))
        return false;
    for (pyb::object &item : static_cast<std::vector<pyb::object> &>(caster))
        items->all.push_back(item.release().ptr());
    return true;
}

bool load_tuple(PyObject *object, Objects *items)
{
    if (!pyb::isinstance<pyb::sequence>(object))
        return false;
    auto sequence = pyb::reinterpret_borrow<pyb::sequence>(object);
    for (size_t i = 0, size = sequence.size(); i < size; i++)
        items->all.push_back(pyb::object(sequence[i]).release().ptr());
    return true;
}

bool is_none(PyObject *object)
{
    return object == Py_None;
}

PyObject *new_none()
{
    return pyb::none().release().ptr();
}

PyObject *make_complex(double real, double imaginary)
{
    return PyComplex_FromDoubles(real, imaginary);
}

PyObject *make_int_array(at::IntArrayRef values)
{
    return Caster<at::IntArrayRef>::cast(values, pyb::return_value_policy::copy, {}).ptr();
}

std::string int_array_name()
{
    return Caster<at::IntArrayRef>::name.text;
}

/* --- names of containers: pybind11's name for a container of a mark, which the inner names replace
 * ----------------------------------------- */

struct Mark {
};

} // namespace opjit

template <>
struct pybind11::detail::type_caster<opjit::Mark> {
    PYBIND11_TYPE_CASTER(opjit::Mark, const_name("\1"));
    bool load(handle, bool) { return false; }
    static handle cast(opjit::Mark, return_value_policy, handle) { return {}; }
};

namespace opjit
{

static void replace(std::string &text, const std::string &from, const std::string &to)
{
    for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
        text.replace(at, from.size(), to);
}

std::string container_name(Container kind, const std::vector<std::string> &inner, size_t size)
{
    std::string all;
    for (const std::string &one : inner)
        all += (all.empty() ? "" : ", ") + one;
    std::string text = kind == Container::list ? Caster<std::vector<Mark>>::name.text
                       : kind == Container::tuple
                           ? inner.empty() ? Caster<std::tuple<>>::name.text : Caster<std::tuple<Mark>>::name.text
                       : kind == Container::optional ? Caster<std::optional<Mark>>::name.text
                       : kind == Container::map      ? Caster<std::map<Mark, Mark>>::name.text
                                                     : Caster<std::array<Mark, 77777>>::name.text;
    replace(text, "77777", std::to_string(size));
    replace(text, kind == Container::map ? "\1, \1" : "\1", all);
    return text;
}

/* --- objects ------------------------------------------------------------------------------------------------------------------------------- */

Objects::~Objects()
{
    for (PyObject *object : all)
        Py_XDECREF(object);
}

static bool is_whole(const std::vector<PyObject *> &all)
{
    return std::find(all.begin(), all.end(), nullptr) == all.end();
}

PyObject *Objects::list()
{
    PyObject *made = is_whole(all) ? PyList_New(static_cast<Py_ssize_t>(all.size())) : nullptr;
    for (size_t i = 0; made && i < all.size(); i++)
        PyList_SET_ITEM(made, i, std::exchange(all[i], nullptr));
    return made;
}

PyObject *Objects::tuple()
{
    PyObject *made = is_whole(all) ? PyTuple_New(static_cast<Py_ssize_t>(all.size())) : nullptr;
    for (size_t i = 0; made && i < all.size(); i++)
        PyTuple_SET_ITEM(made, i, std::exchange(all[i], nullptr));
    return made;
}

PyObject *Objects::dict()
{
    pyb::dict made;
    for (size_t i = 0; i < all.size(); i += 2)
        if (!all[i] || !all[i + 1] || PyDict_SetItem(made.ptr(), all[i], all[i + 1]) != 0)
            return nullptr;
    return made.release().ptr();
}

std::shared_ptr<PyObject> owned(PyObject *object)
{
    if (!object)
        throw pyb::error_already_set();
    return {object, [](PyObject *last) { Py_DECREF(last); }};
}

namespace binding
{

gil_scoped_release::gil_scoped_release() : state(new pyb::gil_scoped_release()) {}
gil_scoped_release::~gil_scoped_release()
{
    delete static_cast<pyb::gil_scoped_release *>(state);
}
gil_scoped_acquire::gil_scoped_acquire() : state(new pyb::gil_scoped_acquire()) {}
gil_scoped_acquire::~gil_scoped_acquire()
{
    delete static_cast<pyb::gil_scoped_acquire *>(state);
}

} // namespace binding

/* --- functions and modules ----------------------------------------------------------------------------------------------------------------- */

static pyb::handle call_bound(pyb::detail::function_call &call)
{
    const auto &bound = *static_cast<const Bound *>(call.func.data[0]);
    PyObject *args[most_arguments];
    bool convert[most_arguments];
    for (size_t i = 0; i < bound.count; i++) {
        args[i] = call.args[i].ptr();
        convert[i] = call.args_convert[i];
    }
    return bound.call(bound.function.get(), args, convert);
}

/* The same steps as in the template of pybind11's class for a function with known types. */
struct Function : pyb::cpp_function {
    Function(PyObject *module, Bound given)
    {
        auto *bound = new Bound(std::move(given));
        auto unique = make_function_record();
        auto *record = unique.get();
        record->data[0] = bound;
        record->free_data = [](pyb::detail::function_record *freed) { delete static_cast<Bound *>(freed->data[0]); };
        record->impl = call_bound;
        record->nargs_pos = static_cast<uint16_t>(bound->count);
        record->name = bound->name.data();
        record->doc = bound->documented ? bound->doc.data() : nullptr;
        record->scope = module;
        pyb::object sibling = pyb::getattr(module, bound->name.c_str(), pyb::none());
        record->sibling = sibling;
        for (const Argument &argument : bound->arguments)
            record->args.emplace_back(argument.name.c_str(), nullptr, pyb::handle(argument.value.get()).inc_ref(), true,
                                      true);
        static const std::type_info *const types[] = {nullptr};
        initialize_generic(std::move(unique), bound->signature.c_str(), types, bound->count);
    }
};

void define(PyObject *module, Bound bound)
{
    if (!bound.arguments.empty() && bound.arguments.size() != bound.count)
        throw std::runtime_error("the number of argument annotations does not match the number of function arguments");
    std::string name = bound.name;
    pyb::reinterpret_borrow<pyb::module_>(module).add_object(name.c_str(), Function(module, std::move(bound)), true);
}

void set_attribute(PyObject *module, const char *name, PyObject *value)
{
    pyb::setattr(module, name, owned(value).get());
}

PyObject *new_module(const char *name, void (*fill)(PyObject *module))
{
    static std::map<std::string, void (*)(PyObject *)> filling;
    filling[name] = fill;
    static PyModuleDef_Slot slots[] = {
        {Py_mod_exec, reinterpret_cast<void *>(+[](PyObject *module) {
             try {
                 pyb::detail::get_internals();
                 filling[reinterpret_cast<const char *>(PyModule_GetDef(module)->m_name)](module);
                 return 0;
             }
             PYBIND11_CATCH_INIT_EXCEPTIONS
             return -1;
         })},
        {0, nullptr}};
    auto *definition =
        new PyModuleDef{PyModuleDef_HEAD_INIT, name, nullptr, 0, nullptr, slots, nullptr, nullptr, nullptr};
    return PyModuleDef_Init(definition);
}

void run_as_torch(void (*run)(void *), void *context)
{
    HANDLE_TH_ERRORS
    run(context);
    END_HANDLE_TH_ERRORS_PYBIND
}

} // namespace opjit
