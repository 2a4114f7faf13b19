"""An op as its author declared it: schema, functions, flags and sources. A newer declaration replaces it as a whole."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from opjit import files
from opjit.backends import Backend, Flags
from opjit.backends.targets import Target
from opjit.declare.gradient_op import GradientOp
from opjit.declare.inline_code import Code
from opjit.environment import is_on
from opjit.errors import DeclarationError, NoKernel
from opjit.recipe import libraries
from opjit.recipe import recipe as recipes
from opjit.recipe.recipe import Recipe
from opjit.recipe.schema import Schema

Function = Callable[..., Any]
Stamp = tuple[int, ...]
Definitions = Mapping[str, Mapping[str, object]]  # of C macros, by the label of their variant
# None stands for the region's dtype, and for all arguments.
AutocastRule = tuple[torch.dtype | None, tuple[str, ...] | None]


@dataclass(frozen=True, eq=False)
class Declaration:
    """An author's declaration of an op.

    Attributes:
        fake: computes the shape, dtype and device of the results, without data.
        folder: the folder of the C and CUDA sources.
        author_flags: the author's additions to a backend's flags, without the definitions of variants.
        code: the sources, if they are text.
        where: the declaration's place, for messages.
        file: the Python file of the declaration; None for inline code.
        stamp: the file's stamp when it was read, if a reload can run it again.
        constant: whether autograd treats the results as constants.
        variants: the definitions of each variant, for C and (True) for CUDA.
        archs: architectures with instructions of one GPU alone, such as ``sm_90a``, to build where a request names ``sm_90``.
        waived: checks of ``opjit test`` that the op need not pass, and why.
    """

    schema: Schema
    fake: Function
    folder: Path
    author_flags: Flags | None = None
    code: Code | None = None
    where: str = ""
    file: Path | None = None
    stamp: Stamp | None = None
    constant: bool = False
    elementwise: bool = False
    archs: tuple[str, ...] = ()
    variants: Mapping[bool, Definitions] = field(default_factory=dict)
    waived: Mapping[str, str] = field(default_factory=dict)
    reference: Function | None = None
    samples: Function | None = None
    workloads: Function | None = None
    backward: Function | None = None
    setup_context: Function | None = None
    vmap: Function | None = None
    autocast: AutocastRule | None = None
    sharding: Function | None = None
    only_listed: bool = False  # only the list of a precompilation names it

    def __post_init__(self) -> None:
        if self.elementwise and not _can_be_elementwise(self.schema):
            raise DeclarationError(
                f"{self.qualified}: elementwise=True requires positional Tensor arguments and new Tensors as results; "
                "remove elementwise=True"
            )
        if self.setup_context and isinstance(self.backward, GradientOp):
            raise DeclarationError(
                f"{self.qualified}: the backward {self.backward.schema.qualified} names the values that a call saves; "
                "remove setup_context"
            )

    @property
    def qualified(self) -> str:
        return self.schema.qualified

    @property
    def place(self) -> str:
        """The place of the declaration, for messages."""
        return self.where or str(self.folder)

    @property
    def flags_of_author(self) -> Flags | None:
        """The author's additions to a backend's flags, with the definitions of the first variant."""
        if not self.variants:
            return self.author_flags
        first = {nvcc: next(iter(each.values())) for nvcc, each in self.variants.items()}
        return self._define(first.get(False, {}), first.get(True, {}))

    def _define(self, c: Mapping[str, object], cuda: Mapping[str, object]) -> Flags:
        from opjit.recipe import flags

        return flags.define(self.qualified, self.folder, self.author_flags, c, cuda)

    def labels(self, backend: Backend) -> list[str]:
        """Return the names of the variants for a backend, ``"TILE=64 UNROLL=1"``; none if there is only one."""
        if backend.compiler:  # an author cannot give flags for another compiler
            return []
        labels = list(self.variants.get(backend.uses_nvcc, ()))
        return labels if len(labels) > 1 else []

    def variant(self, backend: Backend, label: str) -> "Declaration":
        """Return the declaration of a variant alone."""
        definitions = self.variants[backend.uses_nvcc][label]
        return replace(self, author_flags=self._define(definitions, definitions), variants={})

    def traced_parts(self) -> dict[str, object]:
        """Return the parts that decide how torch traces, differentiates and transforms the op; a kernel's code does not."""
        gradient = self.backward
        return {
            "schema": self.schema.text,
            "tags": tuple(self.schema.all_tags),
            "constant": self.constant,
            "elementwise": self.elementwise,
            "fake": self.fake,
            "backward": gradient.overload if isinstance(gradient, GradientOp) else gradient,
            "setup_context": self.setup_context,
            "vmap": self.vmap,
            "autocast": self.autocast,
            "sharding": self.sharding,
            "variants": tuple((nvcc, *labels) for nvcc, labels in self.variants.items()),
        }

    @property
    def differentiable(self) -> bool:
        return self.backward is not None

    @property
    def batches(self) -> bool:
        """Whether torch.vmap supports the op: by a rule, or by a loop if it has a backward."""
        if self.vmap is not None or self.elementwise:
            return True
        return self.differentiable and not self.schema.has_tensor_list

    def stamp_now(self) -> Stamp | None:
        """Return the stamp of its op.py; None for any other file, which a reload does not run again."""
        return stamp_of(self.file)

    def source(self, backend: Backend) -> Path:
        """Find the kernel's source for a backend: in the op's folder, under the op's name or the folder's, or in `backend.kernels`.

        Raises NoKernel if it is missing. An inline op's exists after `OpState.write_code`.
        """
        if self.code is not None and backend.suffix in self.code.texts:
            return self.folder / f"{self.schema.name}{backend.suffix}"
        stems = dict.fromkeys((self.schema.name, self.folder.name))
        names = [f"{stem}{backend.suffix}" for stem in stems]
        paths = [self.folder / name for name in names]
        of_device = ""
        if backend.kernels:
            path = backend.kernels / self.schema.namespace / f"{self.schema.name}{backend.suffix}"
            paths.append(path)
            of_device = f", or {path}"
        for path in paths:
            if path.is_file():
                return path
        missing = f"{self.qualified} has no kernel for {backend.name}"
        if self.code is not None:
            names = [each.name for each in self.code.backends()]
            raise NoKernel(
                f"{missing}: its inline code is for {' and '.join(names)} only; declare it again, "
                f"also with code for {backend.name}"
            )
        found = [each.name for each in self.folder.glob(f"*{backend.suffix}")]
        others = f", found {' and '.join(sorted(found))}; rename it" if found else ""
        raise NoKernel(
            f"{missing}: expected {' or '.join(names)} in {self.folder}{others}"
            f"{of_device}{cpp_advice(self.folder, *stems)}"
        )

    def recipe(self, target: Target, compilers: Sequence[Mapping[str, str]]) -> Recipe:
        """Describe the current inputs of the op's build for a target. Reads its sources, and writes nothing. Raises NoKernel, or OSError.

        Args:
            compilers: their identities, the preferred first (see `toolchain.identities_of`).
        """
        source = self.source(target.backend)
        target = self.target(target)
        flags = self.flags(target)
        text = None
        shown = None
        place = None
        if self.code is not None:
            suffix = target.backend.suffix
            text = self.code.texts[suffix].encode()
            shown = self.code.shown or source.name
            place = partial(self.code.place, self.schema.name, suffix)
        found = recipes.describe(self.schema, target, source, flags, compilers, text, shown)
        return replace(found, only_listed=self.only_listed, place=place)

    def target(self, wanted: Target) -> Target:
        """Return a target with the op's own archs."""
        own = {arch[:-1]: arch for arch in self.archs}
        parts = [own.get(part, part) for part in wanted.arch.split("+")]
        return wanted._replace(arch="+".join(parts))

    def flags(self, target: Target) -> Flags:
        """Return the backend's flags with the op's additions."""
        flags = target.backend.flags(target.arch, target.runtime)
        extra = self.flags_of_author
        debug = is_on("OPJIT_DEBUG")
        if extra is None and not debug:
            return flags
        from opjit.recipe.flags import for_debugger, join

        if extra is not None:
            flags = join(flags, extra, target)
        return for_debugger(flags) if debug else flags

    def libraries(self, target: Target) -> list[str]:
        """Return the shared libraries to open before the op's library."""
        return libraries.to_open(self.flags(target))


def stamp_of(file: Path | None) -> Stamp | None:
    """Return a stamp that changes with an op.py; None for any other file."""
    if file is None or file.name != "op.py":
        return None
    return files.stat_signature(file)


def cpp_advice(folder: Path, *stems: str) -> str:
    """Return advice on a C++ source where an op's C source is expected, or an empty text."""
    for stem in stems:
        for source in sorted(folder.glob(f"{stem}.c[pcx]*")):
            return (
                f'; {source.name} is C++: build it with opjit.load("{source.stem}", ["{source}"])'
            )
    return ""


def _can_be_elementwise(schema: Schema) -> bool:
    tensors = [argument for argument in schema.arguments if argument.kind == "Tensor"]
    positional = not any(each.keyword_only or each.list for each in tensors)
    plain_results = all(
        each.kind == "Tensor" and not each.list and not each.optional for each in schema.results
    )
    return positional and plain_results and not schema.mutates
