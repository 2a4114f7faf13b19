"""The arguments of torch's load and load_inline, by torch's names and types."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

_Strings = list[str] | None
_C = TypeVar("_C", bound="LoaderCall")


@dataclass(frozen=True, kw_only=True)
class LoaderCall:
    """The arguments of both functions. Only opjit has `fast`, and `newer` has the arguments of later versions of torch."""

    function: ClassVar[str]
    name: str
    extra_cflags: _Strings = None
    extra_cuda_cflags: _Strings = None
    extra_sycl_cflags: _Strings = None
    extra_ldflags: _Strings = None
    extra_include_paths: _Strings = None
    build_directory: str | None = None
    verbose: bool = False
    with_cuda: bool | None = None
    with_sycl: bool | None = None
    is_python_module: bool = True
    keep_intermediates: bool = True
    fast: bool = True
    newer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def implicit(self) -> bool:
        """Whether torch's builder adds torch/extension.h."""
        return isinstance(self, InlineCall) and not self.no_implicit_headers

    @classmethod
    def of(cls: type[_C], arguments: Mapping[str, Any]) -> _C:
        """Return the call with some arguments. Raises TypeError if one is missing."""
        known = {each.name for each in fields(cls)} - {"newer"}
        return cls(
            **{name: value for name, value in arguments.items() if name in known},
            newer={name: value for name, value in arguments.items() if name not in known},
        )

    def for_torch(self) -> dict[str, Any]:
        """Return the arguments of torch's function, by name. Lists are copies, because torch lengthens them."""
        given = {**vars(self), **self.newer}
        del given["fast"]
        del given["newer"]
        passed = {}
        for name, value in given.items():
            passed[name] = list(value) if isinstance(value, (list, tuple)) else value
        return passed


@dataclass(frozen=True, kw_only=True)
class LoadCall(LoaderCall):
    """A call of load."""

    function = "load"
    sources: str | list[str]
    is_standalone: bool = False


@dataclass(frozen=True, kw_only=True)
class InlineCall(LoaderCall):
    """A call of load_inline."""

    function = "load_inline"
    cpp_sources: str | list[str]
    cuda_sources: str | list[str] | None = None
    sycl_sources: str | list[str] | None = None
    functions: str | list[str] | dict[str, str] | None = None
    with_pytorch_error_handling: bool = True
    use_pch: bool = False
    no_implicit_headers: bool = False


CALLS: Mapping[str, type[LoadCall | InlineCall]] = {
    each.function: each for each in (LoadCall, InlineCall)
}
