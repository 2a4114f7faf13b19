"""CUDA kernels that serve CPU tensors for the length of a test, so that a test for a GPU also runs without one."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from opjit import backends
from opjit.catalog import registry
from opjit.emulate import build, serve


@contextmanager
def emulated(checked: bool) -> Iterator[None]:
    """Serve CPU tensors by CUDA kernels, and check their accesses if `checked`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPJIT_EMULATE", "1" if checked else "fast")
        patch.setattr(backends, "_backends", {**backends._backends})
        patch.setattr("opjit.cpp_extension.emulator", None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels run emulated
            build.warn_of_emulation()
        serve.serve()
        build.set_checking()
        _unload("cpu")
        yield
        _unload("cuda")


def is_emulated() -> bool:
    """Whether CUDA kernels serve CPU tensors now. Calls cost 1,000 times as much as on a GPU, so tests choose smaller sizes."""
    return "OPJIT_EMULATE" in os.environ


def _unload(backend: str) -> None:
    """Unload a backend's kernels. The next call of an op loads the kernel of the backend that serves its tensors then."""
    for op in registry.all_ops():
        loaded = op.loaded.pop(backend, None)
        if loaded is not None:
            loaded.unload()
