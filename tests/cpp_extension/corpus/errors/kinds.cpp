#include <torch/extension.h>
#include <stdexcept>

void raise(int kind) {
    switch (kind) {
        case 0: TORCH_CHECK(false, "a check: ", 1, " and ", 2.5, " and ", "text"); break;
        case 1: TORCH_CHECK(false); break;
        case 2: TORCH_CHECK_VALUE(false, "a value"); break;
        case 3: TORCH_CHECK_TYPE(false, "a type"); break;
        case 4: TORCH_CHECK_INDEX(false, "an index"); break;
        case 5: TORCH_CHECK_NOT_IMPLEMENTED(false, "not yet"); break;
        case 6: AT_ASSERTM(false, "an assertion"); break;
        case 7: AT_ERROR("an error ", 7); break;
        case 8: TORCH_INTERNAL_ASSERT(false, "an internal assertion"); break;
        case 9: TORCH_CHECK_LINALG(false, "singular"); break;
        case 10: throw std::runtime_error("runtime");
        case 11: throw std::invalid_argument("argument");
        case 12: throw std::out_of_range("range");
        case 13: throw std::domain_error("domain");
        case 14: throw std::overflow_error("overflow");
        case 15: throw std::logic_error("logic");
        case 16: throw std::bad_alloc();
        case 17: throw py::value_error("pybind's value");
        case 18: throw py::key_error("pybind's key");
        case 19: throw py::stop_iteration();
        case 20: throw 3;
        case 21: C10_THROW_ERROR(OutOfMemoryError, "no memory");
        case 22: TORCH_CHECK_WITH(NotImplementedError, false, "with");
        case 23: throw c10::Error({"raise", "file.cpp", 1}, "plain c10");
        case 24: throw std::length_error("length");
        case 25: throw std::range_error("a range error");
        case 26: throw py::type_error("pybind's type");
        case 27: throw py::index_error("pybind's index");
        case 28: throw std::system_error(std::make_error_code(std::errc::no_such_file_or_directory), "system");
    }
}
