"""Maps names to the headers of torch that they need. A program gets the narrow set, and the header of each name that it uses."""

import re

# Torch's headers that every program gets, with all overloads of operators, and of hash, swap and to_string, that a narrow program can see.
# The core has the headers that do not depend on a program, and that torch's ATen/ATen.h includes.
_CORE_NAMES = """
    ATen/core/Tensor.h ATen/core/Formatting.h ATen/core/LegacyTypeDispatch.h ATen/core/Reduction.h
    ATen/Device.h c10/core/InferenceMode.h c10/util/Logging.h c10/util/irange.h
"""
_NARROW_NAMES = """
    math.h stdlib.h ATen/core/grad_mode.h ATen/Functions.h ATen/TensorOperators.h
"""
CORE = tuple(_CORE_NAMES.split())
NARROW = (*CORE, *_NARROW_NAMES.split())

_ROWS = {  # torch's header: the names that need it, as a pattern
    "ATen/Dispatch.h": r"AT_DISPATCH_\w+",
    "ATen/Parallel.h": r"parallel_\w+|\w*(?:num|num_interop)_threads|get_thread_num|in_parallel_region|divup|get_parallel_info|"
    r"lazy_init_num_threads|intraop_\w+|launch|launch_no_thread_state",
    "ATen/TensorIndexing.h": r"indexing|TensorIndex|Slice|Ellipsis|EllipsisIndexType|index(?:_put)?_?(?=\s*\()",
    "ATen/Context.h": r"Context|globalContext|has(?:CUDA|MPS|HIP|IPU|XLA|MKL|MKLDNN|XPU|HPU|MAIA|Openmp|OpenMP|CuDNN|LAPACK|MTIA|Hip)|"
    r"getNumGPUs|manual_seed|NoTF32Guard|ROCmBackwardPassGuard|getDeprecatedTypeProperties|"
    r"AcceleratorHooksInterface|getAccelerator|isAccelerator|"
    r"getCPUAllocator|get\w*HIPHooks|detail::get\w+|at::(?:CPU|CUDA|HIP|MPS)",
    "ATen/CPUGeneratorImpl.h": r"CPUGeneratorImpl|\w*CPUGenerator",
    "ATen/DeviceGuard.h": r"DeviceGuard|OptionalDeviceGuard|device_of",
    "ATen/ExpandUtils.h": r"expand_\w+|infer_\w*size\w*|infer\w+Geometry|are_expandable|sum_to|is_expandable_to|have_same_ndims",
    "ATen/TensorGeometry.h": r"TensorGeometry|\w+TensorGeometry",
    "ATen/ScalarOps.h": r"scalar_to_tensor|wrapped_scalar_tensor\w*|scalar_tensor_static",
    "ATen/NativeFunctions.h": r"native::\w+",
    "ATen/core/UnsafeFromTH.h": r"unsafe\w+FromTH",
    "ATen/core/Generator.h": r"Generator|make_generator|check_generator|get_generator\w*|GeneratorImpl",
    "ATen/core/ivalue.h": r"IValue|ivalue|Future|ITensor\w+|IListRef|List|Dict|GenericList|CustomClassHolder|custom_class\w*|"
    r"make_custom_class|Capsule|EnumHolder",
    "ATen/core/jit_type.h": r"TypePtr|TypeKind|\w+TypePtr|getTypePtr|jit_type|\w+Type::get",
    "ATen/DeviceAccelerator.h": r"accelerator::\w+",
    "ATen/Version.h": r"get_\w+_version|show_config|get_cxx_flags|get_cpu_capability",
    "ATen/record_function.h": r"\w*RecordFunction\w*|RECORD_\w+|\w+Callbacks?|CallbackHandle|RecordScope",
    "c10/core/CPUAllocator.h": r"GetCPUAllocator|SetCPUAllocator",
    "torch/csrc/api/include/torch/detail/TensorDataContainer.h": r"torch::tensor|at::tensor|tensor(?=\s*[({])|TensorDataContainer",
    "torch/headeronly/version.h": r"TORCH_VERSION\w*",
    "torch/csrc/autograd/autograd.h": r"autograd::(?:grad|backward)|forward_ad",
    "torch/csrc/autograd/profiler.h": r"profiler::\w+",
    "torch/csrc/autograd/variable.h": r"Variable|variable_list|edge_list|make_variable\w*|AutogradMeta|ViewInfo|autograd::\w+",
    "torch/csrc/autograd/function.h": r"grad_fn(?=\s*\(\s*\)\s*(?:->|\.))",
    "torch/csrc/autograd/custom_function.h": r"autograd::Function|AutogradContext|Function(?=\s*<)|FunctionCtx|CppNode|SavedVariable|"
    r"namespace\s+torch::autograd|extract_vars",
    "torch/library.h": r"TORCH_LIBRARY\w*|torch::Library|CppFunction|Dispatcher|OperatorHandle|TORCH_FN|TORCH_SELECTIVE_\w+|KernelFunction|"
    r"torch::(?:dispatch|schema|class_|init|arg|custom_class)|BoxedKernel|RegisterOperators|FunctionSchema|OperatorName",
    "torch/cuda.h": r"torch::cuda|cudnn_is_available",
    "torch/nn.h": r"torch::nn|nn::\w+|TORCH_MODULE\w*|OrderedDict|ExpandingArray",
    "torch/optim.h": r"optim::\w+",
    "torch/data.h": r"torch::data",
    "torch/jit.h": r"torch::jit|jit::\w+",
    "torch/serialize.h": r"serialize|pickle_save|pickle_load|torch::(?:save|load)",
    "torch/fft.h": r"torch::fft|fft::\w+",
    "torch/special.h": r"torch::special|special::\w+",
    "torch/nested.h": r"torch::nested",
    "torch/sparse.h": r"torch::sparse",
    "torch/print.h": r"torch::print",
}
_PYTHON = {
    "torch/csrc/autograd/python_variable.h": r"THPVariable\w*|ParameterClass",
    "torch/csrc/utils/python_numbers.h": r"THPUtils_\w+",
    "torch/csrc/utils/python_tuples.h": r"THPUtils_\w*[tT]uple\w*",
    "torch/csrc/Generator.h": r"THPGenerator\w*",
    "torch/csrc/Layout.h": r"THPLayout\w*",
}
STANDARD = {  # headers of the C++ library, and the words that need them. torch/extension.h includes all of them
    "algorithm": "sort stable_sort partial_sort nth_element fill fill_n copy copy_n copy_if reverse max_element min_element minmax_element "
    "transform for_each find find_if count count_if swap_ranges unique lower_bound upper_bound binary_search all_of any_of "
    "none_of clamp generate shuffle rotate remove remove_if replace merge equal is_sorted partition next_permutation",
    "numeric": "accumulate iota inner_product partial_sum reduce gcd lcm",
    "iostream": "cout cerr endl cin clog",
    "iomanip": "setprecision setw setfill",
    "thread": "thread this_thread",
    "mutex": "mutex lock_guard unique_lock once_flag call_once scoped_lock recursive_mutex",
    "condition_variable": "condition_variable",
    "atomic": "atomic atomic_flag memory_order",
    "chrono": "chrono",
    "set": "set multiset",
    "map": "map multimap",
    "unordered_set": "unordered_set unordered_multiset",
    "unordered_map": "unordered_map",
    "deque": "deque",
    "queue": "queue priority_queue",
    "stack": "stack",
    "list": "list",
    "bitset": "bitset",
    "variant": "variant visit",
    "functional": "function bind plus multiplies greater less hash",
    "cassert": "assert",
    "cstdio": "printf fprintf snprintf sprintf puts fopen FILE stderr stdout",
    "climits": "INT_MAX INT_MIN LONG_MAX LLONG_MAX UINT_MAX CHAR_BIT",
    "cstring": "memcpy memset memmove strcmp strlen memcmp",
    "sstream": "stringstream ostringstream istringstream",
    "complex": "complex",
    "typeinfo": "typeid type_info",
    "ctime": "time clock",
    "typeindex": "type_index",
    "span": "span",
    "ranges": "ranges views",
    "bit": "bit_cast popcount",
}
PYTHON = {header: re.compile(rf"\b(?:{pattern})\b") for header, pattern in _PYTHON.items()}
_PATTERNS = {header: re.compile(rf"(?<!\w)(?:{pattern})\b") for header, pattern in _ROWS.items()}
_WORDS = {header: frozenset(words.split()) for header, words in STANDARD.items()}


def headers_of(code: str, words: frozenset[str]) -> list[str]:
    """Return the headers beyond the narrow set that a program's names need."""
    named = [header for header, some in _WORDS.items() if some & words]
    return named + [header for header, pattern in _PATTERNS.items() if pattern.search(code)]
