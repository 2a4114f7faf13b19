"""Builds the kernel in C++ that opjit.declare.cpp_autograd gives to ops."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch

from opjit import progress, request
from opjit.cpp_extension import binary
from opjit.cpp_extension.arguments import LoadCall
from opjit.declare import cpp_autograd
from opjit.errors import CompileError, CompileWarning, OpjitError
from opjit.store.store import Store, default_root


def make(store: Store | None = None, on_build: Callable[[str], object] = lambda line: None) -> None:
    """Fetch or build it, unless the store or, without one, a layer or the cache has it. After an error, the kernel in Python serves.
    `on_build` gets a line before it is built, which takes up to a minute."""
    must_store = store is not None
    store = store or Store(default_root())
    call = LoadCall(
        name=cpp_autograd.NAME,
        sources=[str(cpp_autograd.source())],
        extra_cflags=["-O1"],
        # Without a C++ library: torch has loaded one, and a static one, which some g++ link, would crash.
        extra_ldflags=["-nodefaultlibs", "-lgcc_s", "-lc"],
        with_cuda=False,
        is_python_module=False,
        fast=False,
    )  # light headers bring more than it includes
    wanted = replace(binary.of_call(call, store.notes), must_store=must_store)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "error", CompileWarning
            )  # such as that of a second C++ library: no risk for some microseconds
            if request.look(wanted, store) is None:
                on_build(f"building autograd's kernel in C++ for torch {torch.__version__}")
                request.obtain(wanted, store)
    except (CompileError, CompileWarning) as error:
        cpp_autograd.refused(store, error)
        progress.log(
            f"autograd's kernel in C++ does not fit torch {torch.__version__}, so that in Python serves: {error}"
        )
    except OpjitError as error:
        progress.log(f"autograd's kernel in C++ is not there, so that in Python serves: {error}")
