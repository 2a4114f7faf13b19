/* opjit_bind.cpp - the part of opjit_bind.h that is the same for every extension. */
#include "opjit_torch.h"

namespace opjit
{

bool is_a(PyObject *object, PyTypeObject &type)
{
    int found = PyObject_IsInstance(object, reinterpret_cast<PyObject *>(&type));
    if (found < 0)
        PyErr_Clear();
    return found > 0;
}

PyObject *new_none()
{
    return borrowed(&_Py_NoneStruct).take();
}

static std::string repr(PyObject *object)
{
    Object text(PyObject_Repr(object));
    const char *letters = text ? PyUnicode_AsUTF8AndSize(text.object, nullptr) : nullptr;
    if (!letters)
        PyErr_Clear();
    return letters ? letters : "<repr raised Error>";
}

/* --- conversions -------------------------------------------------------------------------------------------------------------------------- */

static std::string text_of(PyObject *object, const char *attribute)
{
    Object found(PyObject_GetAttrString(object, attribute));
    const char *letters = found ? PyUnicode_AsUTF8AndSize(found.object, nullptr) : nullptr;
    PyErr_Clear();
    return letters ? letters : "";
}

static bool is_numpy_bool(PyObject *object)
{
    Object type(PyObject_GetAttrString(object, "__class__"));
    PyErr_Clear();
    if (!type || text_of(type.object, "__module__") != "numpy")
        return false;
    std::string name = text_of(type.object, "__name__");
    return name == "bool" || name == "bool_";
}

bool load_bool(PyObject *object, bool convert, bool *value)
{
    *value = object == &_Py_TrueStruct;
    if (*value || object == &_Py_FalseStruct)
        return true;
    if (!convert && !is_numpy_bool(object))
        return false;
    int truth = object == &_Py_NoneStruct                    ? 0
                : PyObject_HasAttrString(object, "__bool__") ? PyObject_IsTrue(object)
                                                             : -1;
    PyErr_Clear();
    *value = truth > 0;
    return truth >= 0;
}

/* A number as an int, by __index__ and, if conversions are allowed, by __int__; `read` returns whether it fits. */
template <typename R>
static bool load_integer(PyObject *object, bool convert, R read)
{
    if (is_a(object, PyFloat_Type))
        return false;
    Object index(is_a(object, PyLong_Type) ? nullptr : PyNumber_Index(object));
    PyErr_Clear();
    bool loaded = read(index ? index.object : object);
    PyErr_Clear();
    if (loaded || !convert || !PyNumber_Check(object))
        return loaded;
    Object number(PyNumber_Long(object));
    PyErr_Clear();
    loaded = number && read(number.object);
    PyErr_Clear();
    return loaded;
}

bool load_signed(PyObject *object, bool convert, long *value)
{
    return load_integer(object, convert, [value](PyObject *number) {
        *value = PyLong_AsLong(number);
        return *value != -1 || !PyErr_Occurred();
    });
}

bool load_unsigned(PyObject *object, bool convert, unsigned long *value)
{
    return load_integer(object, convert, [value](PyObject *number) {
        *value = PyLong_AsUnsignedLong(number);
        return *value != static_cast<unsigned long>(-1) || !PyErr_Occurred();
    });
}

bool load_double(PyObject *object, bool convert, double *value)
{
    if (!convert && !is_a(object, PyFloat_Type))
        return false;
    *value = PyFloat_AsDouble(object);
    if (*value != -1 || !PyErr_Occurred())
        return true;
    PyErr_Clear();
    Object number(convert && PyNumber_Check(object) ? PyNumber_Float(object) : nullptr);
    PyErr_Clear();
    if (number)
        *value = PyFloat_AsDouble(number.object);
    return static_cast<bool>(number);
}

bool load_string(PyObject *object, std::string *value)
{
    Py_ssize_t size = 0;
    const char *text = is_a(object, PyUnicode_Type) ? PyUnicode_AsUTF8AndSize(object, &size) : nullptr;
    char *bytes = nullptr;
    if (!text && is_a(object, PyBytes_Type) && PyBytes_AsStringAndSize(object, &bytes, &size) == 0)
        text = bytes;
    if (!text && is_a(object, PyByteArray_Type)) {
        text = PyByteArray_AsString(object);
        size = PyObject_Size(object);
    }
    PyErr_Clear();
    if (text)
        value->assign(text, size);
    return text != nullptr;
}

Object items_of(PyObject *object, bool convert)
{
    if (is_a(object, PyUnicode_Type) || is_a(object, PyBytes_Type))
        return Object();
    if (!PySequence_Check(object)) {
        if (!convert)
            return Object();
        Object type(PyObject_GetAttrString(object, "__class__"));
        PyErr_Clear();
        std::string name = type ? text_of(type.object, "__name__") : "";
        bool known = false;
        for (const char *one :
             {"generator", "set", "frozenset", "dict_keys", "dict_values", "dict_items", "map", "zip"})
            known = known || name == one;
        if (!known)
            return Object();
    }
    Object items(PySequence_List(object));
    PyErr_Clear();
    return items;
}

/* --- calls ------------------------------------------------------------------------------------------------------------------------------- */

struct Function {
    std::string name, doc;
    std::vector<Overload> overloads;
    OpjitMethodDef definition;
};

void sign(Overload &overload, const std::vector<std::string> &types)
{
    size_t count = types.size() - 1;
    for (size_t i = overload.arguments.size(); !overload.named && i < count; i++)
        overload.arguments.push_back({"arg" + std::to_string(i), Object()});
    if (overload.arguments.size() != count)
        throw std::runtime_error("a function of " + std::to_string(count) + " arguments was given names for " +
                                 std::to_string(overload.arguments.size()));
    overload.signature = "(";
    for (size_t i = 0; i < count; i++) {
        const Argument &argument = overload.arguments[i];
        overload.signature += (i ? ", " : "") + argument.name + ": " + types[i];
        if (argument.value)
            overload.signature += " = " + repr(argument.value.object);
    }
    overload.signature += ") -> " + types.back();
}

/* Fill `slots` with an argument for each parameter; false if the call does not fit. */
static bool arrange(const Overload &overload, PyObject *const *args, Py_ssize_t count, PyObject *names,
                    PyObject **slots)
{
    Py_ssize_t size = static_cast<Py_ssize_t>(overload.arguments.size()), named = names ? PyTuple_Size(names) : 0;
    if (count > size || (named && !overload.named))
        return false;
    for (Py_ssize_t i = 0; i < size; i++)
        slots[i] = i < count ? args[i] : nullptr;
    for (Py_ssize_t k = 0; k < named; k++) {
        Py_ssize_t i = count;
        while (i < size &&
               PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, k), overload.arguments[i].name.c_str()) != 0)
            i++;
        if (i == size)
            return false;
        slots[i] = args[count + k];
    }
    for (Py_ssize_t i = count; i < size; i++)
        if (!slots[i] && !(slots[i] = overload.arguments[i].value.object))
            return false;
    return true;
}

static void refuse(const Function &function, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    std::string text =
        function.name + "(): incompatible function arguments. The following argument types are supported:\n";
    for (size_t i = 0; i < function.overloads.size(); i++)
        text += "    " + std::to_string(i + 1) + ". " + function.overloads[i].signature + "\n";
    text += "\nInvoked with: ";
    for (Py_ssize_t i = 0; i < count; i++)
        text += (i ? ", " : "") + repr(args[i]);
    for (Py_ssize_t k = 0; names && k < PyTuple_Size(names); k++) {
        const char *name = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(names, k), nullptr);
        text += (k       ? ", "
                 : count ? "; kwargs: "
                         : "kwargs: ") +
                std::string(name ? name : "?") + "=" + repr(args[count + k]);
    }
    PyErr_Clear();
    PyErr_SetString(PyExc_TypeError, text.c_str());
}

void translate()
{
    try {
        throw;
    } catch (const py::error_already_set &) {
    } catch (const c10::Error &) {
        torch::translate_exception_to_python(std::current_exception());
    } catch (const python_error &) {
        torch::translate_exception_to_python(std::current_exception());
    } catch (const torch::PyTorchError &) {
        torch::translate_exception_to_python(std::current_exception());
    } catch (const std::bad_alloc &e) {
        PyErr_SetString(PyExc_MemoryError, e.what());
    } catch (const std::domain_error &e) {
        PyErr_SetString(PyExc_ValueError, e.what());
    } catch (const std::invalid_argument &e) {
        PyErr_SetString(PyExc_ValueError, e.what());
    } catch (const std::length_error &e) {
        PyErr_SetString(PyExc_ValueError, e.what());
    } catch (const std::out_of_range &e) {
        PyErr_SetString(PyExc_IndexError, e.what());
    } catch (const std::range_error &e) {
        PyErr_SetString(PyExc_ValueError, e.what());
    } catch (const std::overflow_error &e) {
        PyErr_SetString(PyExc_OverflowError, e.what());
    } catch (const std::exception &e) {
        PyErr_SetString(PyExc_RuntimeError, e.what());
    } catch (...) {
        PyErr_SetString(PyExc_RuntimeError, "Caught an unknown exception!");
    }
}

/* Call with errors and warnings as torch's own functions give them. */
static PyObject *call_as_torch(const Overload &overload, PyObject *const *slots, bool convert)
{
    std::exception_ptr error;
    PyObject *result = nullptr;
    try {
        torch::PyWarningHandler warnings;
        try {
            result = overload.call(overload.function.get(), slots, convert);
        } catch (...) {
            error = std::current_exception();
        }
    } catch (...) { /* a warning became an error */
        if (result && result != no_match())
            Py_DecRef(result);
        if (!error && !PyErr_Occurred())
            throw;
        if (!error)
            return nullptr;
        PyErr_Clear(); /* the function's own error comes first */
    }
    if (!error)
        return result;
    try {
        std::rethrow_exception(error);
    } catch (const py::error_already_set &) {
    } catch (const std::exception &) {
        torch::translate_exception_to_python(error);
    }
    return nullptr;
}

static PyObject *called(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    const Function &function = *static_cast<Function *>(PyCapsule_GetPointer(self, nullptr));
    try {
        for (bool convert : {false, true}) {
            if (!convert && function.overloads.size() == 1)
                continue; /* conversions only matter for the choice of an overload */
            for (const Overload &overload : function.overloads) {
                std::vector<PyObject *> slots(overload.arguments.size() + 1);
                if (!arrange(overload, args, count, names, slots.data()))
                    continue;
                PyObject *result = overload.torch_errors
                                       ? call_as_torch(overload, slots.data(), convert)
                                       : overload.call(overload.function.get(), slots.data(), convert);
                if (result != no_match())
                    return result;
            }
        }
        refuse(function, args, count, names);
    } catch (...) {
        translate();
    }
    return nullptr;
}

static void describe(Function &function)
{
    bool several = function.overloads.size() > 1;
    function.doc = several ? function.name + "(*args, **kwargs)\nOverloaded function.\n\n" : "";
    for (size_t i = 0; i < function.overloads.size(); i++) {
        const Overload &overload = function.overloads[i];
        if (several)
            function.doc += (i ? "\n" : "") + std::to_string(i + 1) + ". ";
        function.doc += function.name + overload.signature + "\n";
        if (!overload.doc.empty())
            function.doc += "\n" + overload.doc + "\n";
    }
    function.definition.doc = function.doc.c_str();
}

int filled(PyObject *module, void (*fill)(py::module_ &))
{
    try {
        py::module_ m(module);
        fill(m);
        return 0;
    } catch (...) {
        translate();
        return -1;
    }
}

} // namespace opjit

namespace pybind11
{

void module_::set(const char *name, const opjit::Object &value)
{
    if (!value || PyObject_SetAttrString(module_object.object, name, value.object) != 0)
        throw error_already_set();
}

void module_::add(const char *name, opjit::Overload overload)
{
    opjit::Function *function = nullptr;
    for (opjit::Function *known : *functions)
        function = known->name == name ? known : function;
    if (!function) {
        function = new opjit::Function{name, "", {}, {}};
        function->definition = {function->name.c_str(), opjit::called,
                                0x0080 | 0x0002 /* METH_FASTCALL | METH_KEYWORDS */, ""};
        opjit::Object capsule(PyCapsule_New(function, nullptr, [](PyObject *owner) {
            delete static_cast<opjit::Function *>(PyCapsule_GetPointer(owner, nullptr));
        }));
        opjit::Object module_name(PyModule_GetNameObject(module_object.object));
        set(name, opjit::Object(capsule ? PyCFunction_NewEx(&function->definition, capsule.object, module_name.object)
                                        : nullptr));
        functions->push_back(function);
    }
    function->overloads.push_back(std::move(overload));
    opjit::describe(*function);
}

} // namespace pybind11
