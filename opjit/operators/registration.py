"""Register an op with torch: its schema, its fake kernel, its backward and a first-call kernel.

The first call on a device reaches the first-call kernel. It prepares the device's C kernel and
calls the op again. From then on, torch calls the C kernel.
"""

import ctypes
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._library.utils import lookup_op

from opjit import backends, processes, request, resources
from opjit.declare import fake_kernel
from opjit.declare.declaration import Declaration
from opjit.errors import DeclarationError, NoKernel, OpjitError
from opjit.operators import graph_cache, rules
from opjit.operators.op import Op
from opjit.recipe.schema import Schema
from opjit.tensors import tensors_of

half_declared: dict[
    str, Any
] = {}  # torch's objects for ops that a thread with `processes.declaring` is declaring, None before it has one
_look_up = torch._ops._OpNamespace.__getattr__
_placeholders: dict[
    str, torch.library.Library
] = {}  # keeps torch's entry for an unregistered op; see `forget`


def define(op: Op, earlier: Op | None) -> None:
    """Register an op with torch, and replace the op that had the name before.

    The caller holds `processes.declaring`. Raises DeclarationError if an op of that name is
    declared elsewhere, or if torch rejects it.
    """
    namespace = op.schema.namespace
    name = op.schema.name
    if earlier is not None and earlier is not op:
        refuse_second(earlier, op)
        forget(earlier)
    library = torch.library.Library(namespace, "FRAGMENT")
    try:
        with _hidden(op):
            try:
                _define_schema(library, op)
            except RuntimeError as error:
                raise DeclarationError(
                    f"torch rejects the op {op.qualified}; choose another name or namespace: "
                    f"{str(error).splitlines()[0]}"
                ) from None
            op.library = library
            _register(library, op)
            op.overload = look_up(getattr(torch.ops, namespace), name).default
            setattr(op.overload, "__reduce_ex__", lambda protocol: (getattr, (op, "overload")))  # noqa: B010 - torch's cannot be pickled
            if op.schema.returned:
                _functionalize(library, op)
            rules.bind_autograd(op)
            rules.bind_rules(op)
            bundled = op.folder.is_relative_to(resources.folder("kernels_c"))
            graph_cache.add(op.declaration, bundled)
            graph_cache.note_change(op.declaration)
    except BaseException:
        forget(op)
        raise


def _define_schema(library: torch.library.Library, op: Op) -> None:
    """Define an op's schema. If a library for plain torch defined it before, that library gives it up."""
    define = partial(library.define, op.schema.text.partition("::")[2], tags=_tags(op.schema))
    try:
        define()
    except RuntimeError:
        if not _released(op):
            raise
        define()


def _released(op: Op) -> bool:
    """Let the library that defined an op withdraw it, if `opjit.build_library` made that
    library; see opjit_standalone.h.
    """
    dump = torch._C._dispatch_dump(op.qualified)
    origin = re.search(r"^debug: registered at (.+):\d+$", dump, re.MULTILINE)
    if origin is None or not Path(origin[1]).is_absolute():
        return False
    try:
        release = ctypes.CDLL(origin[1], mode=os.RTLD_NOW | os.RTLD_NOLOAD).opjit_release
    except (OSError, AttributeError):  # another program's, or removed from the disk
        return False
    _keep(op)
    release.restype = None
    release(op.qualified.encode())
    return True


@contextmanager
def _hidden(op: Op) -> Iterator[None]:
    """Let other threads that look the op up in torch.ops wait until the block ends, because
    torch registers a schema before its kernels.
    """
    half_declared[op.qualified] = None
    try:
        yield
        namespace = getattr(torch.ops, op.schema.namespace)
        setattr(namespace, op.schema.name, half_declared[op.qualified])
        namespace._dir.append(op.schema.name)
    finally:
        del half_declared[op.qualified]


def look_up(namespace: Any, name: str) -> Any:
    """Return torch's object for an op after its declaration is complete.

    All threads get the same object. Without this function, threads that look it up at the same time
    would get different objects.
    """
    qualified = f"{namespace.name}::{name}"
    if qualified not in half_declared:
        # No other thread has this namespace, which keeps the overload.
        found = _look_up(torch._ops._OpNamespace(namespace.name), name)
        if qualified not in half_declared:
            namespace._dir.append(name)
            return vars(namespace).setdefault(name, found)
    with processes.declaring:
        if qualified in half_declared:  # this thread declares it
            half_declared[qualified] = half_declared[qualified] or _look_up(
                torch._ops._OpNamespace(namespace.name), name
            )
            return half_declared[qualified]
    return getattr(namespace, name)


def _tags(schema: Schema) -> list[torch.Tag]:
    return [getattr(torch.Tag, name) for name in schema.all_tags]


def _register(library: torch.library.Library, op: Op) -> None:
    name = op.schema.name
    # the first leaves nested tensors out
    for key in ("CompositeExplicitAutograd", "NestedTensorCPU", "NestedTensorCUDA"):
        library.impl(name, partial(_first_call, op), key, with_keyset=True)
    if op.schema.mutates:
        # The kernels of torch resolve these views, but assume that an op which writes an argument
        # also returns it. Without a result, they read invalid memory.
        for key in ("Conjugate", "Negative"):
            message = (
                f"{op.qualified} writes an argument, so it does not accept a lazily conjugated or "
                "negated view; call .resolve_conj() or .resolve_neg() on the tensor first"
            )
            library.impl(name, partial(_refuse, message), key)
    fake_kernel.register(library, op.qualified, partial(_fake, op), op.declaration.place)


def _functionalize(library: torch.library.Library, op: Op) -> None:
    """Give torch's compiler a form of the op without results: inductor of 2.13 and 2.14 writes over an argument that an op returns."""
    schema = op.schema
    name = f"{schema.name}_without_results"
    arguments = schema.text.partition("(")[2].rpartition(" -> ")[0]
    library.define(f"{name}({arguments} -> ()", tags=_tags(schema))

    def call(*args: Any, **kwargs: Any) -> None:
        op.overload(*args, **kwargs)

    library.impl(name, call, "CompositeExplicitAutograd")
    fake_kernel.register(library, f"{schema.namespace}::{name}", lambda *args, **kwargs: None)
    form = lookup_op(f"{schema.namespace}::{name}")

    def functionalized(context: Any, *args: Any, **kwargs: Any) -> Any:
        with context.mode:
            form(*args, **kwargs)
        return _returned(schema, args, kwargs)

    op.overload.py_functionalize_impl(functionalized)


def _returned(schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the arguments of a call that the op returns."""
    found = []
    for index in schema.returned:
        name = schema.arguments[index].name
        found.append(args[index] if index < len(args) else kwargs[name])
    return found[0] if len(found) == 1 else tuple(found)


def refuse_second(earlier: Op, newer: Op) -> None:
    """Refuse a second op of the same name. A later declaration from the same folder or module is the same op."""
    if _owner(earlier.declaration) != _owner(newer.declaration):
        raise DeclarationError(
            f"two ops are named {newer.qualified}: one is declared in {earlier.declaration.place}, the other in "
            f"{newer.declaration.place}; "
            "rename one or declare it in a different namespace"
        )


def _owner(declaration: Declaration) -> object:
    """Return the module of inline code, or the folder."""
    return declaration.folder if declaration.code is None else declaration.code.module


def redeclare(op: Op, newer: Op) -> None:
    """Give an op another schema, which makes it another op for torch."""
    with processes.declaring:
        forget(op)
        op.declaration = newer.declaration
        define(op, op)


def forget(op: Op) -> None:
    """Unregister an op and its kernels, so that its name is free for another declaration.

    A program may still have its overload, and torch would free the overload with the op's last
    registration. Therefore one registration stays: a kernel for a device that opjit ops do not run
    on.
    """
    library = op.library
    if library is None:
        return
    op.library = None
    _keep(op)
    for loaded in op.loaded.values():
        loaded.unload()
    op.loaded.clear()
    rules.forget_sharding(op)
    graph_cache.remove(op.qualified)
    library._destroy()
    # A traceback may keep the library alive: torch frees it later, and would then also unregister
    # the next op of the name.
    library._op_defs.clear()


def _keep(op: Op) -> None:
    """Keep torch's entry for an op alive, once for the process: overloads that a program holds refer to it."""
    if op.qualified in _placeholders:
        return
    _placeholders[op.qualified] = torch.library.Library(op.schema.namespace, "FRAGMENT")
    _placeholders[op.qualified].impl(
        op.schema.name, partial(_refuse, f"{op.qualified} does not support Vulkan"), "Vulkan"
    )


def _refuse(message: str, *args: Any, **kwargs: Any) -> Any:
    raise NoKernel(message)


def _fake(op: Op, *args: Any, **kwargs: Any) -> Any:
    """Put the device check of the C kernels before the declared fake kernel. torch calls the fake
    kernel if any tensor is a meta tensor.

    Without the check, a result on another device would be uninitialized memory.
    """
    devices = {tensor.device for tensor in tensors_of((args, kwargs))}
    if len(devices) > 1:
        names = sorted(map(str, devices))
        raise RuntimeError(
            f"{op.qualified}: expected all tensors on one device, but they are on {' and '.join(names)}; "
            "move them with .to()"
        )
    graph_cache.note_trace(op.declaration)
    # DTensor calls this before it looks for a rule, and torch's compiler before it compiles.
    rules.bind_late(op)
    declaration = op.declaration
    result = declaration.fake(*args, **kwargs)
    if op.schema.returned:
        return _returned(op.schema, args, kwargs)
    fake_kernel.check_results(declaration, result, next(iter(devices), None))
    return result


def _first_call(op: Op, keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
    """The kernel that torch calls until a C kernel is registered."""
    qualified = op.qualified
    key = torch._C._dispatch_key_name(keys.highestPriorityTypeId())
    backend = backends.for_dispatch_key(key)
    if backend is None:
        raise NoKernel(
            f"{qualified} does not support tensors of the kind {key}: it accepts dense tensors on "
            f"{' or '.join(dict.fromkeys([*op.backends(), *op.loaded])) or 'no device'}, and at least one of them"
        )
    try:
        request.ready_for_call(op, backends.serving(backend, op.backends()))
    except OpjitError as error:
        raise error.with_traceback(None) from error.__cause__  # the frames below do not help a user
    if not torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key):
        raise NoKernel(
            f"the kernel of {qualified} for {backend.name} did not register; call opjit.get({qualified!r}, {backend.name!r})"
        )
    return op.overload.redispatch(keys, *args, **kwargs)
