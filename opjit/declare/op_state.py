"""An op in this process: its declaration, its operator in torch, and its kernels."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from opjit import backends, loader, processes
from opjit.backends import Backend
from opjit.declare import cpp_autograd
from opjit.declare.declaration import Declaration
from opjit.errors import CompileError, NoKernel
from opjit.loader import Loaded
from opjit.recipe.schema import Schema
from opjit.store.entry import Entry


class OpState:
    """The part of an op that a request needs; `operators.op.Op` adds what its author and its users need.

    Attributes:
        declaration: the author's declaration, which is replaced as a whole.
        overload: ``torch.ops.<namespace>.<name>.default``; set when the op is registered with torch.
        library: the op's registrations with torch; None for an op that is not registered.
        loaded: the kernels in this process, by backend name.
        failed: the last build that failed, by backend name: the name of its request, and the error.
        lock: held while the op is readied or reloaded.
        rules: the names of the rules that are registered with torch; see operators/rules.py.
        has_passthrough: whether autograd's kernel in Python does nothing to a call that needs no derivative.
    """

    overload: torch._ops.OpOverload

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration
        self.library: torch.library.Library | None = None
        self.loaded = dict[str, Loaded]()
        self.failed = dict[str, tuple[str, CompileError]]()
        self.lock = processes.Lock()
        self.rules = set[str]()
        self.has_passthrough = False

    @property
    def schema(self) -> Schema:
        return self.declaration.schema

    @property
    def qualified(self) -> str:
        return self.declaration.qualified

    def backends(self) -> list[str]:
        """Return the names of the backends that the op has a source for."""
        names = []
        for backend in backends.all_backends():
            with suppress(NoKernel):
                self.declaration.source(backend)
                names.append(backend.name)
        return names

    def devices(self) -> list[str]:
        """Return the names of the backends that the op has a source for and that this process can run."""
        names = self.backends()
        here = [each.name for each in backends.all_backends() if each.available() is None]
        return [name for name in here if name in names]

    def variant(self, backend: Backend, label: str) -> "OpState":
        """Return a variant as an op that is not registered with torch; the first variant is the op itself."""
        if label == next(iter(self.declaration.variants[backend.uses_nvcc])):
            return self
        return OpState(self.declaration.variant(backend, label))

    def write_code(self) -> None:
        """Write an inline op's sources to this process's temporary folder, unless they are there."""
        code = self.declaration.code
        if code is not None:
            self.declaration = replace(self.declaration, folder=code.write(self.schema.name))

    def install_kernel(self, backend: Backend, loaded: Loaded) -> None:
        """Note a backend's kernel, let calls that need no derivative pass without Python if a cache has that part, and let variants run."""
        self.bind_autograd(backend, loaded)
        self.loaded[backend.name] = loaded
        self.enable_variants(backend)

    def bind_autograd(self, backend: Backend, loaded: Loaded) -> None:
        """Give the op autograd's kernel in C++ for a backend, instead of an earlier one."""
        if loaded.unbind_autograd is not None:
            loaded.unbind_autograd()
        if self.has_passthrough:
            key = f"Autograd{backend.dispatch_key}"
            backward = self.declaration.backward
            loaded.unbind_autograd = cpp_autograd.bind(self.schema.text, key, backward)

    def replace_kernel(self, name: str, entry: Entry, libraries: Sequence[str] = ()) -> None:
        """Make torch call an entry's kernel on a backend, instead of the loaded kernel. The caller holds the op's lock."""
        backend = backends.for_device(name)
        if name in self.loaded:
            self.loaded[name].replace(entry, self.qualified)
            self.enable_variants(backend)
        else:
            self.install_kernel(backend, loader.load(entry, self.qualified, libraries))

    def enable_variants(self, backend: Backend) -> None:
        """Let variants run on a backend on which the op is loaded, if it has any."""
        if self.declaration.labels(backend):
            self.loaded[backend.name].registered.opjit_enable_variants()
