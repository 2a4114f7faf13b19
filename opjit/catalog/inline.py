"""Ops with sources that are strings."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from opjit import backends, files
from opjit.builder import glue
from opjit.catalog import reload
from opjit.declare import fake_kernel
from opjit.declare.declaration import Declaration, Function
from opjit.declare.inline_code import Code
from opjit.errors import DeclarationError, OpjitError
from opjit.files import StrPath
from opjit.operators.op import Op
from opjit.recipe import flags
from opjit.recipe.schema import Schema, parse

NAMESPACE = "inline"


def inline(
    schema: str,
    *,
    c: str | None = None,
    cuda: str | None = None,
    like: str | Sequence[str] | None = None,
    fake: Function | None = None,
    extra_cflags: Sequence[str] = (),
    extra_cuda_cflags: Sequence[str] = (),
    extra_ldflags: Sequence[str] = (),
    extra_include_paths: Sequence[StrPath] = (),
    extra_cuda_ldflags: Sequence[str] = (),
    extra_sources: Sequence[StrPath] = (),
    differentiable: bool = True,
    elementwise: bool = False,
) -> Op:
    """Declare an op from C or CUDA code in a string. Like any op, it is compiled at the first call.

    If the same module declares the op again with different code, opjit rebuilds its loaded kernels immediately. The op then runs the new
    code, also in other threads and in compiled functions. After an error, the earlier code stays in use.

    Args:
        schema: a torch schema. The default namespace is ``inline``.
        c: C code that defines ``<name>_cpu``. It need not include ``opjit.h``.
        cuda: CUDA C code that defines ``<name>_cuda``. It need not include ``opjit_cuda.h``.
        like: the Tensor argument that determines the shape, strides, dtype and device of the result. For several results, a list of names.
        fake: the fake kernel, for any other result, see `opjit.op`. Without `like` and `fake` the op runs, but cannot be traced.
        extra_cflags: as in `opjit.op`. Relative paths of all arguments start from the current directory.
        extra_cuda_cflags: flags for the CUDA compiler.
        extra_ldflags: flags for the linker.
        extra_include_paths: directories of headers.
        extra_cuda_ldflags: flags for the linker of the CUDA library.
        extra_sources: more source files.
        differentiable: as in `opjit.op`.
        elementwise: as in `opjit.op`.

    Returns:
        The op, which is also ``torch.ops.inline.<name>``. Call it, or add a backward with ``.backward``, see `opjit.op`.

    Raises:
        SchemaError: torch cannot parse the schema, or C does not support a type.
        DeclarationError: there is no code, or `like` does not match the schema.
        CompileError: the new code of an op in use does not compile. Line numbers refer to the string.

    Example:
        >>> scale = opjit.inline("scale(Tensor x, float a) -> Tensor", like="x", c='''
        ... opjit_status scale_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
        ... {
        ...     OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && x->contiguous, "scale takes a contiguous float32 tensor");
        ...     OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
        ...     for (int64_t i = 0; i < x->numel; i++)
        ...         ((float *)out->data)[i] = (float)a * ((const float *)x->data)[i];
        ...     return OPJIT_OK;
        ... }''')
        >>> scale(torch.ones(2), 2.5)
        tensor([2.5000, 2.5000])
    """
    caller = sys._getframe(1)
    program = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    extras = (
        extra_cflags,
        extra_cuda_cflags,
        extra_ldflags,
        extra_include_paths,
        extra_cuda_ldflags,
        extra_sources,
    )
    try:
        op = make(
            schema,
            {"cpu": c, "cuda": cuda},
            like,
            fake,
            caller.f_globals.get("__name__", "__main__"),
            f"inline code at {program}",
            program=program,
            extras=extras,
            differentiable=differentiable,
            elementwise=elementwise,
        )
        return reload.install([op])[0]
    except OpjitError as error:
        raise error.with_traceback(None) from error.__cause__  # the frames below do not help a user


def make(
    text: str,
    sources: Mapping[str, str | None],
    like: str | Sequence[str] | None,
    fake: Function | None,
    module: str,
    where: str,
    shown: str | None = None,
    extras: Sequence[Sequence[Any]] = (),
    differentiable: bool = True,
    elementwise: bool = False,
    program: str = "",
) -> Op:
    """Make an op from strings, by backend name, undeclared. See `Code` for `module` to `shown`, `flags.check_flags` for `extras`."""
    schema = parse(text if "::" in text.partition("(")[0] else f"{NAMESPACE}::{text.strip()}")
    texts = {
        backends.for_device(name).suffix: source
        for name, source in sources.items()
        if source is not None
    }
    if not texts:
        prototype = glue.prototype(schema, backends.for_device("cpu"))
        raise DeclarationError(
            f"{schema.qualified} expected code for an op; pass c= with {prototype}, or cuda=, or "
            "both"
        )
    for suffix, source in texts.items():
        if not isinstance(source, str):
            raise DeclarationError(
                f"{schema.qualified}: the code of {schema.name}{suffix} must be a string, not {source!r}"
            )
    extra = flags.check_flags(schema.qualified, Path.cwd(), *extras) if any(extras) else None
    code = Code(texts, module, shown, program)
    # Until a build writes the sources, the same path in all processes, so that notes on it hold.
    folder = code.folder_in(files.local_folder(), schema.name)
    declaration = Declaration(
        schema,
        _fake_kernel(schema, like, fake),
        folder,
        extra,
        code=code,
        where=where,
        constant=not differentiable,
        elementwise=elementwise,
    )
    return Op(declaration)


def _fake_kernel(
    schema: Schema, like: str | Sequence[str] | None, fake: Function | None
) -> Function:
    if like is not None and fake is not None:
        raise DeclarationError(
            f"{schema.qualified}: like= and fake= both describe the results; give one of them"
        )
    if fake is not None:
        fake_kernel.check_signature(schema, fake)
        return fake
    if like is None:

        def missing(*args: Any, **kwargs: Any) -> None:
            if schema.results:
                raise DeclarationError(
                    f"{schema.qualified} lacks a fake kernel, so it cannot be traced or called "
                    "with meta tensors; pass like= or fake=, or in a notebook cell --like X or "
                    "--fake NAME"
                )

        return missing
    names = [like] if isinstance(like, str) else list(like)
    places = {
        argument.name: index
        for index, argument in enumerate(schema.arguments)
        if argument.kind == "Tensor" and not (argument.list or argument.optional)
    }
    plain = all(
        result.kind == "Tensor" and not (result.list or result.optional)
        for result in schema.results
    )
    if not plain or len(names) != len(schema.results) or not set(names) <= set(places):
        raise DeclarationError(
            f"like={like!r}: expected the name of a Tensor argument for each result of {schema.text}, and only results that are "
            "tensors; correct the name, or pass a function as fake="
        )

    def empty(*args: Any, **kwargs: Any) -> Any:
        results = tuple(
            torch.empty_like(args[places[name]] if places[name] < len(args) else kwargs[name])
            for name in names
        )
        return results[0] if len(results) == 1 else results

    return empty
