"""Builds the kernel in C++ that opjit.declare.cpp_autograd gives to ops."""

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch

from opjit import progress, request
from opjit.cpp_extension import binary
from opjit.cpp_extension.arguments import LoadCall
from opjit.declare import cpp_autograd
from opjit.errors import CompileError, CompileWarning, OpjitError
from opjit.store.store import Store, default_store


def make(store: Store | None = None, on_build: Callable[[str], object] = lambda line: None) -> None:
    """Fetch or build the kernel, unless `store` has it or, if `store` is None, a layer or the cache has it.

    If that fails, ops use the kernel in Python. `on_build` receives a line before a build, which can last a minute.
    """
    must_store = store is not None
    store = store or default_store()
    # Light headers declare more than it includes.
    call = LoadCall(
        name=cpp_autograd.NAME,
        sources=[str(cpp_autograd.source())],
        extra_cflags=["-O1"],
        # Without a C++ library, because torch has loaded one, and a static one, which some g++ link, would crash.
        extra_ldflags=["-nodefaultlibs", "-lgcc_s", "-lc"],
        with_cuda=False,
        is_python_module=False,
        fast=False,
    )
    wanted = replace(binary.of_call(call, store.notes), must_store=must_store)
    try:
        with warnings.catch_warnings():
            # A warning, for example about a second C++ library, ends this: saving microseconds is not worth a risk.
            warnings.simplefilter("error", CompileWarning)
            if request.lookup(wanted, store) is None:
                on_build(f"building autograd's kernel in C++ for torch {torch.__version__}")
                request.fetch_or_build(wanted, store)
    except (CompileError, CompileWarning) as error:
        progress.log(
            f"autograd's kernel in C++ does not fit torch {torch.__version__}, so that in Python serves: {error}"
        )
    except OpjitError as error:
        progress.log(f"autograd's kernel in C++ is not there, so that in Python serves: {error}")
