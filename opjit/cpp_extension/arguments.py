"""The arguments of torch's load and load_inline, by torch's names and types."""

from typing import NamedTuple

_Strings = list[str] | None


class LoadArguments(NamedTuple):
    """Those of load."""

    name: str
    sources: str | list[str]
    extra_cflags: _Strings
    extra_cuda_cflags: _Strings
    extra_sycl_cflags: _Strings
    extra_ldflags: _Strings
    extra_include_paths: _Strings
    build_directory: str | None
    verbose: bool
    with_cuda: bool | None
    with_sycl: bool | None
    is_python_module: bool
    is_standalone: bool
    keep_intermediates: bool


class LoadInlineArguments(NamedTuple):
    """Those of load_inline."""

    name: str
    cpp_sources: str | list[str]
    cuda_sources: str | list[str] | None
    sycl_sources: str | list[str] | None
    functions: str | list[str] | dict[str, str] | None
    extra_cflags: _Strings
    extra_cuda_cflags: _Strings
    extra_sycl_cflags: _Strings
    extra_ldflags: _Strings
    extra_include_paths: _Strings
    build_directory: str | None
    verbose: bool
    with_cuda: bool | None
    with_sycl: bool | None
    is_python_module: bool
    with_pytorch_error_handling: bool
    keep_intermediates: bool
    use_pch: bool
    no_implicit_headers: bool
