"""The C headers, bundled ops and templates: inside the package in a wheel, next to it in a checkout."""

from functools import cache
from pathlib import Path
from string import Template

_PACKAGE = Path(__file__).resolve().parent


@cache
def folder(name: str) -> Path:
    """Return the folder ``kernels_c`` or ``templates``, or one in them."""
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def include_path() -> str:
    """Return the directory of opjit.h, for editors and build systems.

    Example:
        >>> opjit.include_path()
        '…/kernels_c'
    """
    return str(folder("kernels_c"))


@cache
def template(name: str) -> str:
    return (folder("templates") / name).read_bytes().decode()


def filled(name: str, /, **values: object) -> str:
    """Return a template with values in place of its names, which follow a dollar sign."""
    return Template(template(name)).substitute(values)
