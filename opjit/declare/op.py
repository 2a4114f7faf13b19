"""An op: its schema, its author's functions, and its kernels by backend. registration.py makes it known to torch."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from opjit import backends, files, loader, processes
from opjit.backends import Backend, Flags
from opjit.backends.targets import Target
from opjit.declare import autograd, cpp_autograd, graph_cache, sharding, transforms, variants
from opjit.declare.inline_code import Code
from opjit.declare.sample import Sample, Workload
from opjit.environment import is_on
from opjit.errors import CompileError, DeclarationError, NoKernel, OpjitError
from opjit.loader import Loaded
from opjit.recipe import libraries, schema
from opjit.recipe.headers import Scan
from opjit.recipe.recipe import Recipe, read_inputs
from opjit.store.entry import Entry

Function = Callable[..., Any]


class Op:
    """A declared op; made by `opjit.op` or `opjit.inline`.

    Attributes:
        schema: the schema as torch parsed it.
        folder: the folder of its C and CUDA sources.
        fake: computes the shape, dtype and device of the results, without data.
        overload: ``torch.ops.<namespace>.<name>.default``; set once torch knows the op.
        constant: whether autograd treats its results as constants.
        elementwise: as its author declared it; see `opjit.op`.
        loaded: the kernels in this process, by backend name.

    Example:
        >>> [scale] = opjit.add_path("my_ops")
        >>> scale.qualified, scale.backends()
        ('mylib::scale', ['cpu'])
        >>> scale.overload(torch.ones(2), 2.5)
        tensor([2.5000, 2.5000])
    """

    overload: torch._ops.OpOverload

    def __init__(
        self,
        text: str,
        fake: Function,
        folder: Path,
        extra: Flags | None = None,
        code: Code | None = None,
        where: str | None = None,
        file: Path | None = None,
        constant: bool = False,
        elementwise: bool = False,
        tags: Sequence[str] = (),
    ) -> None:
        self.schema = schema.parse(text, tags)
        tensors = [argument for argument in self.schema.arguments if argument.kind == "Tensor"]
        if elementwise and (
            self.schema.mutates
            or any(each.keyword_only or each.list for each in tensors)
            or any(
                each.kind != "Tensor" or each.list or each.optional for each in self.schema.results
            )
        ):
            raise DeclarationError(
                f"{self.qualified} is declared with elementwise=True, which is for an op that takes positional Tensors "
                "and returns new ones; leave that out"
            )
        self.folder = folder
        self.fake = fake
        self.extra = self._own = (
            extra  # its author's additions to a backend's flags; without the definitions of its first variant
        )
        self.definitions: dict[
            bool, variants.Definitions
        ] = {}  # its variants, in C and (True) in CUDA
        self.code = code  # its sources, if they are text
        self.where = where or str(folder)  # for messages
        self.file = file  # the Python file of its declaration; None for inline code
        self.stamp = self.stamp_now()  # as of the file that was read
        self.handle: torch.library.Library | None = None  # all that torch knows of the op
        self.constant = constant
        self.elementwise = elementwise
        self.loaded: dict[str, Loaded] = {}
        self.failed: dict[
            str, tuple[str, CompileError]
        ] = {}  # the last build that failed, by backend name, and the key of its inputs
        self.lock = processes.Lock()  # held while the op is readied or reloaded
        self._reference: Function | None = None
        self._samples: Function | None = None
        self._workloads: Function | None = None
        self._backward: Function | None = None
        self._setup_context: Function | None = None
        self._vmap: Function | None = None
        self._autocast: transforms.AutocastRule | None = None
        self._sharding: Function | None = None
        self.waived: dict[
            str, str
        ] = {}  # checks of ``opjit test`` that the op need not pass, and why
        self._passes = False  # whether autograd's kernel in Python does nothing to a call that needs no derivative
        self._bound: set[str] = set()  # rules that torch knows

    def __repr__(self) -> str:
        return f"<opjit op {self.schema.text}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.overload(*args, **kwargs)
        except OpjitError as error:
            raise error.with_traceback(
                None
            ) from error.__cause__  # torch's and opjit's frames tell a user nothing

    @property
    def qualified(self) -> str:
        return self.schema.qualified

    def reference(self, function: Function) -> Function:
        """Declare the same op in plain torch, with which tests and benchmarks compare it."""
        self._reference = function
        return function

    def samples(self, function: Function) -> Function:
        """Declare the calls that tests make: ``samples(device)`` covers dtypes, strides, odd and empty sizes. Each is a tuple of arguments,
        a pair ``(args, kwargs)``, or an `opjit.Sample`."""
        self._samples = function
        return function

    def waive(self, check: str, why: str) -> None:
        """Have ``opjit test`` leave a check out, and show the reason.

        Args:
            check: its name in the table, such as ``"nan and inf"``; any other is an error of ``opjit test``.
        """
        self.waived[check] = why

    def workloads(self, function: Function) -> Function:
        """Declare the lines of ``opjit bench``: ``workloads(device)`` yields a `Workload` for each."""
        self._workloads = function
        return function

    def backward(self, function: Function) -> Function:
        """Declare the derivative, ``backward(ctx, *grads)``, as torch.library.register_autograd takes it.

        Raises:
            DeclarationError: the op writes an argument or has keyword-only Tensors; torch cannot differentiate such ops. Or it is
                declared with differentiable=False.
        """
        if self.constant:
            raise DeclarationError(
                f"{self.qualified} is declared with differentiable=False; leave that out, or the backward"
            )
        if self.schema.mutates:
            raise DeclarationError(
                f"{self.qualified} writes an argument, and torch takes no backward for such an op; return a new tensor"
            )
        self._refuse_keyword_only("backward")
        self._backward = function
        graph_cache.note_change(self)
        return function

    def setup_context(self, function: Function) -> Function:
        """Declare what the backward needs of a call: ``setup_context(ctx, inputs, output)``, for an op with keyword-only arguments
        ``(ctx, inputs, keyword_only_inputs, output)``, as torch.library.register_autograd takes it."""
        self._setup_context = function
        graph_cache.note_change(self)
        return function

    def variants(
        self, device: str | None = None, /, **values: Sequence[object]
    ) -> Callable[[Function], Function]:
        """Declare variants: each combination of values is a binary of its own, whose source sees them as -D definitions. opjit measures
        them at the first call on a device with tensors of about a size, and keeps the choice in the cache; see ``opjit tune``.

        Args:
            device: ``"cpu"`` or ``"cuda"``; None is both.
            values: those of each definition; the first combination runs where nothing can be measured.

        Returns:
            A decorator for a function that says of a combination whether it is one.

        Raises:
            DeclarationError: there is no combination, or a value is none that a flag can hold.

        Example:
            >>> @scale.variants("cpu", TILE=(64, 256), UNROLL=(1, 4))
            ... def fits(TILE, UNROLL):
            ...     return TILE % UNROLL == 0
        """
        combinations = variants.combinations(self, device, values)

        def among(fits: Function) -> Function:
            self._vary(device, [each for each in combinations if fits(**each)])
            return fits

        self._vary(device, combinations)
        return among

    def _vary(self, device: str | None, combinations: Sequence[Mapping[str, object]]) -> None:
        if not combinations:
            raise DeclarationError(
                f"{self.qualified} has no variant: no combination of values is one"
            )
        found = {
            " ".join(f"{name}={value}" for name, value in each.items()): each
            for each in combinations
        }
        self.definitions = {
            **self.definitions,
            **dict.fromkeys((False, True) if device is None else (device == "cuda",), found),
        }
        self.extra = self._with(
            *(
                next(iter(self.definitions.get(for_nvcc, {}).values()), {})
                for for_nvcc in (False, True)
            )
        )
        self.bind_rules()

    def _with(self, c: Mapping[str, object], cuda: Mapping[str, object]) -> Flags:
        from opjit.recipe import flags

        return flags.define(self.qualified, self.folder, self._own, c, cuda)

    def labels(self, backend: Backend) -> list[str]:
        """Return the names of its variants for a backend, ``"TILE=64 UNROLL=1"``; none if it has only one."""
        found = list(self.definitions.get(backend.uses_nvcc, ()))
        return (
            [] if backend.compiler or len(found) < 2 else found
        )  # the flags of other compilers are not the author's to know

    def variant(self, backend: Backend, label: str) -> "Op":
        """Return a variant as an op of its own, which torch does not know; the first is the op itself."""
        found = self.definitions[backend.uses_nvcc]
        if label == next(iter(found)):
            return self
        return Op(
            self.schema.text,
            self.fake,
            self.folder,
            self._with(found[label], found[label]),
            self.code,
            self.where,
            tags=self.schema.tags,
        )

    def _choose(self, backend: Backend) -> None:
        """Let variants run, where the op has them for a backend on which it was loaded."""
        if self.labels(backend):
            self.loaded[backend.name].registered.opjit_vary()

    def vmap(self, function: Function) -> Function:
        """Declare the batching rule, ``vmap(info, in_dims, *args)``, as torch.library.register_vmap takes it. Without one, torch.vmap calls
        the op for each element of the batch, or once if it is declared with elementwise=True.

        Example:
            >>> @scale.vmap
            ... def vmap(info, in_dims, x, a):
            ...     return torch.ops.mylib.scale(x.movedim(in_dims[0], 0), a), 0
        """
        self._refuse_keyword_only("vmap rule")
        self._vmap = function
        self.bind_rules()
        return function

    def _refuse_keyword_only(self, what: str) -> None:
        if any(
            argument.keyword_only and argument.kind == "Tensor"
            for argument in self.schema.arguments
        ):
            raise DeclarationError(
                f"{self.qualified} has a keyword-only Tensor, for which torch takes no {what}; make it positional"
            )

    def autocast(self, dtype: torch.dtype | None = None, only: Sequence[str] | None = None) -> None:
        """In regions of torch.autocast, convert floating-point arguments before the call; without a rule, the op takes them as they are.
        As in torch's own rules, float64 stays.

        Args:
            dtype: torch.float32, or another; None is the region's dtype.
            only: the names of the arguments to convert; None is all.

        Example:
            >>> scale.autocast(torch.float32)
            >>> with torch.autocast("cpu", dtype=torch.bfloat16):
            ...     torch.ops.mylib.scale(torch.ones(2, dtype=torch.bfloat16), 2.5)
            tensor([2.5000, 2.5000])

        Raises:
            DeclarationError: the op writes an argument: it would write a converted copy; or it has no Tensor of a name.
        """
        if self.schema.mutates:
            raise DeclarationError(
                f"{self.qualified} writes an argument, and autocast would hand it a converted copy; convert it there"
            )
        self._autocast = dtype, None if only is None else transforms.places(self.schema, only)
        self.bind_rules()

    def sharding(self, function: Function) -> Function:
        """Declare how DTensors may be split, ``sharding(*args, **kwargs)``, as torch.distributed.tensor.experimental.register_sharding
        takes it: the placements of the results, with those that the arguments then need. An op declared with elementwise=True has a rule.

        Example:
            >>> @scale.sharding
            ... def sharding(x, a):
            ...     from torch.distributed.tensor import Replicate, Shard
            ...     return [([place], [place, None]) for place in (Replicate(), *map(Shard, range(x.ndim)))]
        """
        self._sharding = function
        graph_cache.note_change(self)
        return function

    def bind(self) -> None:
        """Tell torch what autograd does with the op, and its rules. torch gets methods, so that a reload can exchange the functions."""
        assert self.handle is not None
        self._bound.clear()
        self._passes = False
        if self.constant:
            self.handle.impl(self.schema.name, torch.library.fallthrough_kernel, "Autograd")
        else:
            self._passes = autograd.bind(self)
        self.bind_rules()

    def bind_rules(self) -> None:
        """Tell torch the rules for vmap and autocast, each once, and let DTensor ask for the sharding rule anew."""
        if self.handle is not None:
            self._bind_once(
                "vmap",
                self._vmap is not None or self.elementwise,
                lambda: torch.library.register_vmap(self.qualified, self.run_vmap, lib=self.handle),
            )
            self._bind_once(
                "autocast", self._autocast is not None, lambda: transforms.bind_autocast(self)
            )
            self._bind_once("variants", self.definitions, lambda: variants.bind(self))
            self.forget_sharding()
            graph_cache.note_change(self)

    def bind_late(self) -> None:
        """Tell DTensor the op's rule, and torch's compiler its variants, each once, if the process uses it."""
        self._bind_once(
            "sharding",
            self._sharding is not None or self.elementwise,
            lambda: sharding.bind(self.overload, self._shard),
        )
        self._bind_once("inductor", self.definitions, lambda: variants.feed_inductor(self))

    def _bind_once(self, rule: str, wanted: object, bind: Callable[[], object]) -> None:
        """Tell torch a rule that it does not know; `bind` returns False where it cannot, yet."""
        if wanted and rule not in self._bound and bind() is not False:
            self._bound.add(rule)

    def forget_sharding(self) -> None:
        """Take the op's rule back from DTensor, if that knows it."""
        if "sharding" in self._bound:
            sharding.forget(self.overload)
            self._bound.remove("sharding")

    def run_backward(self, ctx: Any, *grads: Any) -> Any:
        if self._backward is None:
            raise RuntimeError(
                f"derivative for {self.qualified} is not implemented; add one with @{self.schema.name}.backward"
            )
        return self._backward(ctx, *grads)

    def run_setup_context(self, **context: Any) -> None:
        if self._setup_context is not None:
            self._setup_context(**context)

    def run_vmap(
        self, info: Any, in_dims: tuple[int | None, ...], *args: Any, **kwargs: Any
    ) -> Any:
        if self._vmap is not None:
            return self._vmap(info, in_dims, *args, **kwargs)
        if self.schema.draws and info.randomness != "different":  # torch's words and default
            raise RuntimeError(
                f"vmap: called random operation {self.qualified} with randomness={info.randomness!r}; each element of the "
                "batch gets numbers of its own, so call torch.vmap(..., randomness='different')"
            )
        rule = transforms.elementwise if self.elementwise else transforms.loop
        return rule(self.overload, info, in_dims, args, kwargs)

    def _shard(self, *args: Any, **kwargs: Any) -> Any:
        return (
            self._sharding(*args, **kwargs)
            if self._sharding is not None
            else sharding.elementwise(self.overload, args)
        )

    def cast(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (
            (args, kwargs)
            if self._autocast is None
            else transforms.cast(args, kwargs, self._autocast)
        )

    @property
    def batches(self) -> bool:
        """Whether torch.vmap takes the op by a rule: the declared one, or a loop for an op with a backward."""
        return (
            self._vmap is not None
            or self.elementwise
            or (self.differentiable and not transforms.has_list(self.schema))
        )

    @property
    def differentiable(self) -> bool:
        """Whether it has a backward."""
        return self._backward is not None

    def use(self, backend: str, entry: Entry, libraries: Sequence[str] = ()) -> None:
        """Make torch call an entry's kernel, in place of one that is loaded. The caller holds the op's lock."""
        if backend in self.loaded:
            self.loaded[backend].replace(entry, self.qualified)
            self._choose(backends.for_device(backend))
        else:
            self.keep(backends.for_device(backend), loader.load(entry, self.qualified, libraries))

    def keep(self, backend: Backend, loaded: Loaded) -> None:
        """Note a backend's kernel, let calls that need no derivative pass without Python, where that is compiled, and let variants run."""
        if self._passes:
            loaded.unbind_autograd = cpp_autograd.bind(
                self.qualified, f"Autograd{backend.dispatch_key}"
            )
        self.loaded[backend.name] = loaded
        self._choose(backend)

    def traced_parts(self) -> dict[str, object]:
        """Return what decides how torch traces, differentiates and transforms the op; no kernel's code is part of it."""
        return {
            "schema": self.schema.text,
            "tags": self.schema.all_tags,
            "constant": self.constant,
            "elementwise": self.elementwise,
            "fake": self.fake,
            "backward": self._backward,
            "setup_context": self._setup_context,
            "vmap": self._vmap,
            "autocast": self._autocast,
            "sharding": self._sharding,
            "variants": [(for_nvcc, *labels) for for_nvcc, labels in self.definitions.items()],
        }

    def stamp_now(self) -> tuple[int, ...] | None:
        """Changes with the op.py of the declaration; None for any other file, which a reload does not run again."""
        return (
            files.stamp(self.file) if self.file is not None and self.file.name == "op.py" else None
        )

    def adopt(self, newer: "Op") -> None:
        """Take over a newer declaration, except for its schema: see registration.redeclare."""
        for name in (
            "folder",
            "fake",
            "extra",
            "_own",
            "definitions",
            "code",
            "where",
            "file",
            "stamp",
            "constant",
            "elementwise",
            "_reference",
            "_samples",
            "_workloads",
            "_backward",
            "_setup_context",
            "_vmap",
            "_autocast",
            "_sharding",
            "waived",
        ):
            setattr(self, name, getattr(newer, name))
        self.bind_rules()
        for backend in self.loaded:
            self._choose(backends.for_device(backend))

    @property
    def reference_function(self) -> Function:
        """The declared reference: the op in plain torch. Raises DeclarationError if there is none."""
        return self._declared(self._reference, "reference")

    def samples_on(self, device: str) -> Iterator[Sample]:
        """Yield the declared samples on a device. Raises DeclarationError if there are none."""
        yield from map(Sample.of, self._declared(self._samples, "samples")(device))

    def workloads_on(self, device: str) -> Iterator[Workload]:
        """Yield the declared workloads on a device. Raises DeclarationError if there are none."""
        yield from self._declared(self._workloads, "workloads")(device)

    def _declared(self, function: Function | None, what: str) -> Function:
        if function is None:
            raise DeclarationError(
                f"{self.qualified} declares no {what}; add @{self.schema.name}.{what} to its op.py"
            )
        return function

    def write_code(self) -> None:
        """Write an inline op's sources to this process's temporary folder, unless they are there."""
        if self.code is not None:
            self.folder = self.code.write(self.schema.name)

    def source(self, backend: Backend) -> Path:
        """Find the kernel's source for a backend: in the op's folder, under the op's name or the folder's, or in `backend.kernels`. Raises
        NoKernel if there is none. An inline op has its source after `write_code`."""
        if self.code is not None and backend.suffix in self.code.texts:
            return self.folder / f"{self.schema.name}{backend.suffix}"
        names = dict.fromkeys(
            f"{stem}{backend.suffix}" for stem in (self.schema.name, self.folder.name)
        )
        of_device = (
            [backend.kernels / self.schema.namespace / f"{self.schema.name}{backend.suffix}"]
            if backend.kernels
            else []
        )
        for place in (*(self.folder / name for name in names), *of_device):
            if place.is_file():
                return place
        if self.code is not None:
            devices = " and ".join(
                each.name for each in backends.all_backends() if each.suffix in self.code.texts
            )
            raise NoKernel(
                f"{self.qualified} has no kernel for {backend.name}: its inline code is for {devices} only; declare it again "
                f"with code for {backend.name}, too"
            )
        raise NoKernel(
            f"{self.qualified} has no kernel for {backend.name}: expected {' or '.join(names)} in {self.folder}"
            f"{''.join(f', or {place}' for place in of_device)}{of_cpp(self.folder, self.schema.name, self.folder.name)}"
        )

    def recipe(
        self, target: Target, compilers: Sequence[Mapping[str, str]], scan: Scan | None = None
    ) -> Recipe:
        """Describe what the op is built from for a target, now. Reads its files; writes none. Raises NoKernel, or OSError. `compilers`:
        their identities, the preferred first (see `toolchain.identities_of`); `scan` shares header scans between ops."""
        source, flags = self.source(target.backend), self.flags(target)
        if self.code is not None:
            scan = scan or Scan()
            scan.texts[str(source)] = self.code.texts[target.backend.suffix].encode()
        shown = None if self.code is None else self.code.shown or source.name
        preferred = compilers[0] if compilers else None
        return Recipe(
            self.schema,
            target,
            source,
            read_inputs(source, target, flags, scan),
            flags,
            preferred,
            shown,
            tuple(compilers[1:]),
        )

    def flags(self, target: Target) -> Flags:
        """Return the backend's flags with the op's own."""
        flags = target.backend.flags(target.arch, target.runtime)
        if self.extra is None and not is_on("OPJIT_DEBUG"):
            return flags
        from opjit.recipe.flags import for_debugger, join

        flags = join(flags, self.extra, target) if self.extra is not None else flags
        return for_debugger(flags) if is_on("OPJIT_DEBUG") else flags

    def libraries(self, target: Target) -> list[str]:
        """Return the shared libraries to open before the op's own."""
        flags = self.flags(target)
        if not flags.shared and not any(map(os.path.isabs, flags.link)):
            return []
        return libraries.to_open(flags)

    def backends(self) -> list[str]:
        """Return the names of the backends that the op has a source for."""
        names = []
        for backend in backends.all_backends():
            with suppress(NoKernel):
                self.source(backend)
                names.append(backend.name)
        return names

    def devices(self) -> list[str]:
        """Return the names of the backends that the op has a source for and that this process can run."""
        own = self.backends()
        return [
            backend.name
            for backend in backends.all_backends()
            if backend.name in own and backend.available() is None
        ]


def of_cpp(folder: Path, *stems: str) -> str:
    """Return advice on a C++ source in the place of an op's, or an empty text."""
    source = next((path for stem in stems for path in sorted(folder.glob(f"{stem}.c[pcx]*"))), None)
    return (
        f'; {source.name} is C++: build it with opjit.load("{source.stem}", ["{source}"])'
        if source
        else ""
    )
