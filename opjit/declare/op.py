"""An op: its schema, what torch must know of it before any binary exists, and its kernels for each backend.

What torch is told of it is in registration.py.
"""

import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from opjit import autograd, backends, files, schema
from opjit.backends import Backend, Flags
from opjit.errors import DeclarationError, NoKernel
from opjit.loader import Loaded

Function = Callable[..., Any]


class Workload(NamedTuple):
    """One line of a benchmark.

    Attributes:
        label: such as ``"float32 2^20"``.
        args, kwargs: of the call.
        bytes: the fewest that the op must move through memory.
    """

    label: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    bytes: int


class Code(NamedTuple):
    """An op's sources as text, in the place of files; see `opjit.inline`.

    Attributes:
        texts: by the suffix of the file that they stand for.
        module: name of the module that declared it; another declaration in there takes its place.
        shown: what a compiler's message calls the text; None is the file's name.
    """

    texts: Mapping[str, str]
    module: str
    shown: str | None = None


class Op:
    """A declared op; made by `opjit.op` or `opjit.inline`.

    Attributes:
        schema: what torch parsed.
        folder: where its C and CUDA sources are.
        fake: computes the shape, dtype and device of the results, without data.
        extra: what its author adds to a backend's flags; None where that is nothing.
        library: the library that it is known from, where nothing else declares it.
        code: its sources, where they are text.
        where: the place of its declaration, for messages.
        file: the Python file of its declaration; None where that is a manifest or inline code.
        stamp: what showed that the file was the same.
        handle: torch's, while torch knows the op; dropping it would take the op back.
        loaded: the kernels in this process, by backend name.
    """

    def __init__(self, text: str, fake: Function, folder: Path, extra: Flags | None = None, library: Path | None = None,
                 code: Code | None = None, where: str | None = None, file: Path | None = None) -> None:
        self.schema = schema.parse(text)
        self.folder = folder
        self.fake = fake
        self.extra = extra
        self.library = library
        self.code = code
        self.where = where or str(folder)
        self.file = file
        self.stamp = self.stamp_now()
        self.handle: torch.library.Library | None = None
        self.loaded: dict[str, Loaded] = {}
        self.lock = threading.RLock()  # one build of this op at a time in this process
        self._reference: Function | None = None
        self._samples: Function | None = None
        self._workloads: Function | None = None
        self._backward: Function | None = None
        self._setup_context: Function | None = None
        self._differentiable = False  # to torch

    def __repr__(self) -> str:
        return f"<opjit op {self.schema.text}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.overload(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """As a function's, a copy is the op itself; in another process, the one of that name there."""
        return _named, (self.qualified,)

    @property
    def qualified(self) -> str:
        return self.schema.qualified

    @property
    def overload(self) -> torch._ops.OpOverload:
        """``torch.ops.<namespace>.<name>.default``: what torch calls and traces."""
        packet = getattr(getattr(torch.ops, self.schema.namespace), self.schema.name)
        overload: torch._ops.OpOverload = packet.default
        return overload

    def reference(self, function: Function) -> Function:
        """Decorator: the same op in plain torch; what tests and benchmarks compare with."""
        self._reference = function
        return function

    def samples(self, function: Function) -> Function:
        """Decorator: ``samples(device)`` yields ``(args, kwargs)`` pairs that cover dtypes, strides, odd and empty sizes."""
        self._samples = function
        return function

    def workloads(self, function: Function) -> Function:
        """Decorator: ``workloads(device)`` yields a `Workload` for each line of ``opjit bench``."""
        self._workloads = function
        return function

    def backward(self, function: Function) -> Function:
        """Decorator: ``backward(ctx, *grads)`` as torch.library.register_autograd takes it.

        Raises:
            DeclarationError: the op writes an argument or has keyword-only Tensors, which torch cannot differentiate.
        """
        if self.schema.mutates:
            raise DeclarationError(f"{self.qualified} writes an argument, and torch takes no backward for such an op; return a new tensor")
        if any(argument.keyword_only and argument.kind == "Tensor" for argument in self.schema.arguments):
            raise DeclarationError(f"{self.qualified} has a keyword-only Tensor, for which torch takes no backward; make it positional")
        self._backward = function
        self._register_backward()
        return function

    def setup_context(self, function: Function) -> Function:
        """Decorator: ``setup_context(ctx, inputs, output)``, or with ``keyword_only_inputs`` behind inputs, as torch takes it."""
        self._setup_context = function
        self._register_backward()
        return function

    def _register_backward(self) -> None:
        """torch is told once; a reload only changes what its calls come to."""
        if self._backward is not None and self.handle is not None and not self._differentiable:
            autograd.bind(self, self._run_backward, self._run_setup_context, self.handle)
            self._differentiable = True

    def _run_backward(self, ctx: Any, *grads: Any) -> Any:
        if self._backward is None:
            raise DeclarationError(f"{self.qualified} has no backward since it was declared anew; add one with "
                                   f"@{self.schema.name}.backward")
        return self._backward(ctx, *grads)

    def _run_setup_context(self, **given: Any) -> None:
        if self._setup_context is not None:
            self._setup_context(**given)

    def stamp_now(self) -> tuple[int, ...] | None:
        """Changes with the file of the declaration; None where there is no op.py, which alone may be run again."""
        return files.stamp(self.file) if self.file is not None and self.file.name == "op.py" else None

    def adopt(self, newer: "Op") -> None:
        """Become what a newer declaration says, but for what torch knows: the schema changes in registration.redeclare."""
        for name in ("folder", "fake", "extra", "library", "code", "where", "file", "stamp", "_reference", "_samples", "_workloads",
                     "_backward", "_setup_context"):
            setattr(self, name, getattr(newer, name))
        self._register_backward()

    @property
    def plain(self) -> Function:
        """The declared reference: the op in plain torch.

        Raises:
            DeclarationError: there is none.
        """
        if self._reference is None:
            raise DeclarationError(f"{self.qualified} declares no reference; add one with @{self.schema.name}.reference in its op.py")
        return self._reference

    def sample(self, device: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The declared samples on a device.

        Raises:
            DeclarationError: the op declares none.
        """
        if self._samples is None:
            raise DeclarationError(f"{self.qualified} declares no samples; add them with @{self.schema.name}.samples in its op.py")
        yield from self._samples(device)

    def work(self, device: str) -> Iterator[Workload]:
        """The declared workloads on a device.

        Raises:
            DeclarationError: the op declares none.
        """
        if self._workloads is None:
            raise DeclarationError(f"{self.qualified} declares no workloads; add them with @{self.schema.name}.workloads in its op.py")
        yield from self._workloads(device)

    def source(self, backend: Backend) -> Path:
        """The kernel's source for a backend: named after the op or, where a folder has several ops, after the folder.

        It lies in the op's folder or, for a backend that brings kernels of its own, in `backend.kernels`.

        Raises:
            NoKernel: there is none.
        """
        if self.code is not None:
            from opjit import inlined

            self.folder = inlined.write(self.schema.name, self.code.texts)
        folders = [self.folder, *([backend.kernels / self.schema.namespace] if backend.kernels else [])]
        names = dict.fromkeys(f"{stem}{backend.suffix}" for stem in (self.schema.name, self.folder.name))
        for folder in folders:
            for name in names:
                if (folder / name).is_file():
                    return folder / name
        if self.code is not None:
            given = " and ".join(each.name for each in backends.all_backends() if each.suffix in self.code.texts)
            raise NoKernel(f"{self.qualified} has no kernel for {backend.name}: its inline code is for {given} only; declare it again with "
                           f"code for {backend.name}, too")
        raise NoKernel(f"{self.qualified} has no kernel for {backend.name}: expected {' or '.join(names)} in "
                       f"{' or '.join(map(str, folders))}")

    def backends(self) -> list[str]:
        """Names of the backends that the op has a source for."""
        found = []
        for backend in backends.all_backends():
            try:
                self.source(backend)
            except NoKernel:
                continue
            found.append(backend.name)
        return found

    def devices(self) -> list[str]:
        """Names of the backends that the op has a source for and that this process can run."""
        own = self.backends()
        return [backend.name for backend in backends.all_backends() if backend.name in own and backend.available() is None]


def _named(qualified: str) -> Op:
    from opjit import catalog

    return catalog.find(qualified)


def op(text: str, *, extra_cflags: Sequence[str] = (), extra_cuda_cflags: Sequence[str] = (), extra_ldflags: Sequence[str] = (),
       extra_include_paths: Sequence[str | os.PathLike[str]] = ()) -> Callable[[Function], Op]:
    """Declare an op; the decorated function is its fake kernel.

    The op's C and CUDA sources lie beside the file that declares it: ``<name>.c`` with ``<name>_cpu``, ``<name>.cu`` with
    ``<name>_cuda``. Nothing is compiled until the op is first asked for or called.

    Args:
        text: a torch schema, such as ``"mylib::scale(Tensor x, float a) -> Tensor"``; without a namespace it is ``opjit``'s.
        extra_cflags: flags for the ``.c`` kernel, behind opjit's own, each one argument (no shell reads them): ``["-DTILE=64"]``.
        extra_cuda_cflags: the same for the ``.cu`` kernel: ``["--use_fast_math", "-Xptxas=-O2"]``.
        extra_ldflags: system libraries that the kernels call, for every backend: ``["-lz"]``. The binary may ask for these, and
            for no others; like libc, they are found on each machine and their content is not part of the key.
        extra_include_paths: folders of more headers, from the op's folder on; what is included from them enters the key.

    Raises:
        SchemaError: torch cannot parse the schema, or C has no form for it.
        DeclarationError: an op of that name is declared already, with other files or another schema; or a flag would break what
            opjit promises of a binary, and then the message names another way.

    Example:
        >>> @opjit.op("mylib::scale(Tensor x, float a) -> Tensor", extra_cflags=["-DTILE=64"])
        ... def scale(x, a):
        ...     return torch.empty_like(x)
    """

    def declare(fake: Function) -> Op:
        from opjit import catalog

        file = Path(inspect.unwrap(fake).__code__.co_filename).resolve()
        folder = file.parent
        extra = None
        if extra_cflags or extra_cuda_cflags or extra_ldflags or extra_include_paths:
            from opjit import extras

            extra = extras.check(text.partition("(")[0], folder, extra_cflags, extra_cuda_cflags, extra_ldflags, extra_include_paths)
        return catalog.add(Op(text, fake, folder, extra, file=file))

    return declare
