"""An op: its schema, what torch must know of it before any binary exists, and its kernels for each backend.

Declaring defines the op with torch, with its fake kernel, its backward and one Python kernel that stands in for every device.
The first call on a device reaches that stand-in; it readies the device's C kernel and calls the op again. From then on torch
finds the C kernel by itself.
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
_library_lock = threading.RLock()
_kept: dict[str, torch.library.Library] = {}  # keeps torch's entry of an op that was taken back; see `forget`


def _renew_locks() -> None:
    """A forked child has no thread that could free a lock that was held at the fork."""
    from opjit import catalog

    globals()["_library_lock"] = threading.RLock()
    for declared in catalog.all_ops():
        declared.lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_locks)


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
        """Become what a newer declaration says, but for what torch knows: the schema changes in `redeclare`."""
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


def define(declared: Op) -> None:
    """Make the op known to torch: schema, fake kernel and stand-in.

    Raises:
        DeclarationError: an op of that name is declared elsewhere, or torch does not take it.
    """
    from opjit import catalog

    qualified = declared.qualified
    with _library_lock:
        known = catalog.declared(qualified)
        if known is not None and known is not declared:
            if known.library is not None and known.library != declared.library:
                raise DeclarationError(f"{qualified} was loaded from {known.library} before it was declared; import its declaration first, "
                                       "then call opjit.load_library")
            refuse_second(known, declared)
            forget(known)
        library = torch.library.Library(declared.schema.namespace, "FRAGMENT")
        signature = declared.schema.text.partition("::")[2]
        try:
            library.define(signature, tags=(torch.Tag.pt2_compliant_tag,))
        except RuntimeError as error:
            raise DeclarationError(f"torch does not take the op {qualified}, so choose another name or namespace: "
                                   f"{str(error).splitlines()[0]}") from None
        library.impl(declared.schema.name, _stand_in(declared), "CompositeExplicitAutograd", with_keyset=True)
        if declared.schema.mutates:
            for key in ("Conjugate", "Negative"):
                library.impl(declared.schema.name, _refuse_lazy_views(qualified), key)
        # torch asks inspect where this line is, and inspect would look through all of torch's modules, 2 ms, for this one.
        inspect.modulesbyfile.setdefault(__file__, __name__)
        torch.library.register_fake(qualified, _fake(declared), lib=library)
        declared.handle = library
        declared._register_backward()


def refuse_second(known: Op, declared: Op) -> None:
    """Two ops may not have one name; a later declaration in the same place is the same op.

    Raises:
        DeclarationError: names both places.
    """
    one, other = (op.folder if op.code is None else op.code.module for op in (known, declared))
    if one != other:
        raise DeclarationError(f"two ops are named {declared.qualified}: one is declared in {known.where}, the other in {declared.where}; "
                               "rename one or give it a namespace of its own")


def redeclare(known: Op, newer: "Op") -> None:
    """Give an op another schema: for torch it is another op, of the same name."""
    forget(known)
    known.schema = newer.schema
    known.adopt(newer)
    define(known)


def forget(declared: Op) -> None:
    """Take an op back from torch, with its kernels: the next declaration of its name starts anew.

    Somebody may have its overload still. torch would free what that refers to with the op's last registration, so one is left: a
    kernel for a kind of tensor that no op of opjit's takes.
    """
    from opjit import api, loader

    api.forget_got()
    if declared.handle is not None and declared.qualified not in _kept:
        _kept[declared.qualified] = torch.library.Library(declared.schema.namespace, "FRAGMENT")
        _kept[declared.qualified].impl(declared.schema.name, _refuse(declared.qualified), "Vulkan")
    for loaded in declared.loaded.values():
        loader.unload(loaded)
    declared.loaded.clear()
    if declared.handle is not None:
        declared.handle._destroy()
    declared.handle, declared._differentiable = None, False
    namespace = getattr(torch.ops, declared.schema.namespace)
    if declared.schema.name in namespace.__dict__:
        delattr(namespace, declared.schema.name)


def _refuse(qualified: str) -> Function:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NoKernel(f"{qualified} has no kernel for Vulkan")

    return refuse


def _refuse_lazy_views(qualified: str) -> Function:
    """For conjugated and negated views torch has a kernel of its own, which resolves them. After an op that writes it takes the
    written tensor from the op's results without looking whether there is one, and reads memory that is not there."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NoKernel(f"{qualified} writes an argument, and then takes no tensor that is a lazily conjugated or negated view; "
                       "call .resolve_conj() or .resolve_neg() on it first")

    return refuse


def _fake(declared: Op) -> Function:
    """The fake kernel, with the check that the C kernels make: torch asks it as soon as one tensor is a meta tensor, and with a
    result on another device it would hand out memory that nobody filled."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        values = (item for value in (*args, *kwargs.values()) for item in (value if isinstance(value, (list, tuple)) else (value,)))
        devices = {str(value.device) for value in values if isinstance(value, torch.Tensor)}
        if len(devices) > 1:
            raise RuntimeError(f"{declared.qualified}: expected all tensors on one device, but they are on "
                               f"{' and '.join(sorted(devices))}; move them with .to()")
        return declared.fake(*args, **kwargs)

    return fake


def _stand_in(declared: Op) -> Function:
    """The Python kernel that torch calls where no C kernel is registered yet."""
    qualified = declared.qualified

    def first_call(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        from opjit import api

        key = torch._C._dispatch_key_name(keys.highestPriorityTypeId())
        backend = backends.for_dispatch_key(key)
        if backend is None:
            raise NoKernel(f"{qualified} has no kernel for tensors of the kind {key}: it takes dense tensors on "
                           f"{' or '.join(declared.backends()) or 'no device'}, and at least one of them")
        api.ready(declared, backend)
        if not torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key):
            raise NoKernel(f"the kernel of {qualified} for {backend.name} did not register; "
                           f"call opjit.get({qualified!r}, {backend.name!r})")
        return declared.overload.redispatch(keys, *args, **kwargs)

    return first_call
