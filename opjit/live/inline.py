"""Ops whose sources are strings."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from opjit import backends, catalog, extras, files, glue, reload
from opjit.errors import DeclarationError
from opjit.op import Code, Function, Op
from opjit.schema import Schema, parse

NAMESPACE = "inline"
_COMMENT_OR_STRING = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'""", re.DOTALL)
_MAIN = re.compile(r"\bmain\s*\([^;{}]*\)\s*\{")
_folder: Path | None = None  # this process's, for all sources


def _forget_folder() -> None:
    """A forked child makes its own: the parent's goes when the parent does."""
    globals()["_folder"] = None


os.register_at_fork(after_in_child=_forget_folder)


def inline(schema: str, *, c: str | None = None, cuda: str | None = None, like: str | Sequence[str] | None = None,
           fake: Function | None = None, extra_cflags: Sequence[str] = (), extra_cuda_cflags: Sequence[str] = (),
           extra_ldflags: Sequence[str] = (), extra_include_paths: Sequence[str | os.PathLike[str]] = ()) -> Op:
    """Declare an op whose sources are strings. It is compiled when it is first called or asked for, like any op.

    Declared again by the same module, it is the same op with other code: what is loaded of it is built at once, and the op and
    its overload stay good, in other threads and in compiled code too. An error leaves the earlier code in use.

    Args:
        schema: a torch schema; without a namespace it is ``inline``'s.
        c: defines ``<name>_cpu``. ``opjit.h`` is included already.
        cuda: defines ``<name>_cuda``. ``opjit_cuda.h`` is included already.
        like: name of the Tensor argument that the result is an ``empty_like`` of; a list of names for several results.
        fake: for any other result: the fake kernel, as under `opjit.op`. Without either the op runs, but cannot be traced.
        extra_cflags, extra_cuda_cflags, extra_ldflags, extra_include_paths: as `opjit.op` takes them; relative folders start
            from the current one.

    Returns:
        The op, which can be called, and takes ``.backward`` and the rest; it is also ``torch.ops.inline.<name>``.

    Raises:
        SchemaError: torch cannot parse the schema, or C has no form for it.
        DeclarationError: there is no code or it has a main(); or `like` does not fit the schema.
        CompileError: an op in use got code that does not compile. Line numbers are those of the string.

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
    op = make(schema, {"cpu": c, "cuda": cuda}, like, fake, caller.f_globals.get("__name__", "__main__"),
              f"inline code at {caller.f_code.co_filename}:{caller.f_lineno}", extra_cflags=extra_cflags,
              extra_cuda_cflags=extra_cuda_cflags, extra_ldflags=extra_ldflags, extra_include_paths=extra_include_paths)
    reload.put([op])
    declared = catalog.declared(op.qualified)
    assert declared is not None  # `put` declared it
    return declared


def make(text: str, sources: Mapping[str, str | None], like: str | Sequence[str] | None, fake: Function | None, module: str, where: str,
         shown: str | None = None, extra_cflags: Sequence[str] = (), extra_cuda_cflags: Sequence[str] = (),
         extra_ldflags: Sequence[str] = (), extra_include_paths: Sequence[str | os.PathLike[str]] = ()) -> Op:
    """An op from strings, not yet known to torch.

    Args:
        sources: by backend name.
        module, where, shown: see `Code` and `Op`.
    """
    schema = parse(text if "::" in text.partition("(")[0] else f"{NAMESPACE}::{text.strip()}")
    given = {name: source for name, source in sources.items() if source is not None}
    if not given:
        raise DeclarationError(f"{schema.qualified} has no code: give c= with {_prototype(schema, 'cpu')}, or cuda=, or both")
    for name, source in given.items():
        if not isinstance(source, str):
            raise DeclarationError(f"{schema.qualified}: the code for {name} is a string, not {source!r}")
        if _MAIN.search(_COMMENT_OR_STRING.sub(" ", source)):
            raise DeclarationError(f"the code of {schema.qualified} has a main(), which nobody would call: an op is the function "
                                   f"{_prototype(schema, name)}; what main() does goes into Python")
    code = Code({backends.for_device(name).suffix: source for name, source in given.items()}, module, shown)
    folder = write(schema.name, code.texts)
    extra = None
    if extra_cflags or extra_cuda_cflags or extra_ldflags or extra_include_paths:
        extra = extras.check(schema.qualified, Path.cwd(), extra_cflags, extra_cuda_cflags, extra_ldflags, extra_include_paths)
    return Op(schema.text, _fake_kernel(schema, like, fake), folder, extra, code=code, where=where)


def write(name: str, texts: Mapping[str, str]) -> Path:
    """The folder of an op's sources, named by their content: a compiler that reads them never sees them change."""
    content = "\0".join([name, *(part for item in sorted(texts.items()) for part in item)])
    folder = _private_folder() / hashlib.sha256(content.encode()).hexdigest()[:20]
    for suffix, text in texts.items():
        path = folder / f"{name}{suffix}"
        if not path.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
            temporary = folder / f".{files.unique()}"
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
    return folder


def _private_folder() -> Path:
    global _folder
    if _folder is None or not _folder.is_dir():
        _folder = files.until_exit("opjit-inline-")
    return _folder


def _prototype(schema: Schema, backend: str) -> str:
    return glue.prototype(schema, backend, backends.for_device(backend).stream)


def _fake_kernel(schema: Schema, like: str | Sequence[str] | None, fake: Function | None) -> Function:
    """The fake kernel that `like` or `fake` asks for."""
    if like is not None and fake is not None:
        raise DeclarationError(f"{schema.qualified}: like= and fake= say the same thing; give one of them")
    if fake is not None:
        return fake
    if like is None:
        return _no_fake(schema)
    names = [like] if isinstance(like, str) else list(like)
    if len(names) != len(schema.results) or any(result.kind != "Tensor" for result in schema.results):
        raise DeclarationError(f"{schema.qualified}: like= names a Tensor argument for each result, each of which is a Tensor, but "
                               f"it has {len(names)} name{'s' * (len(names) != 1)} for the results "
                               f"({', '.join(result.kind for result in schema.results)}); give fake= a function")
    places = {argument.name: index for index, argument in enumerate(schema.arguments)
              if argument.kind == "Tensor" and not (argument.list or argument.optional)}
    for name in names:
        if name not in places:
            raise DeclarationError(f"{schema.qualified}: like= names {name!r}, which is none of its Tensors: "
                                   f"{', '.join(places) or 'it has none'}")

    def empty(*args: Any, **kwargs: Any) -> Any:
        made = tuple(torch.empty_like(args[places[name]] if places[name] < len(args) else kwargs[name]) for name in names)
        return made[0] if len(made) == 1 else made

    return empty


def _no_fake(schema: Schema) -> Function:
    def fake(*args: Any, **kwargs: Any) -> None:
        if schema.results:
            raise DeclarationError(f"{schema.qualified} has no fake kernel, so it cannot be traced or called with meta tensors; declare it "
                                   "with like= or fake=")

    return fake
