"""What torch knows of an op: the schema, its fake kernel, its backward and one Python kernel that stands in for every device.

The first call on a device reaches that stand-in; it readies the device's C kernel and calls the op again. From then on torch
finds the C kernel by itself.
"""

from __future__ import annotations

import inspect
import linecache
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from opjit import backends, forks
from opjit.errors import DeclarationError, NoKernel
from opjit.op import Function, Op

# Held while an op is declared, and while one that comes with opjit is looked up in torch. Who holds it takes no other lock of opjit's.
declaring = threading.RLock()
_kept: dict[str, torch.library.Library] = {}  # keeps torch's entry of an op that was taken back; see `forget`


def _acquire() -> None:
    """A fork waits: a child of a half declared op could neither use it nor declare it."""
    declaring.acquire()


def _release() -> None:
    with suppress(RuntimeError):  # `watch` was called again while the fork waited: this is once more than `_acquire`
        declaring.release()


def _renew() -> None:
    global declaring
    declaring = threading.RLock()


def watch() -> None:
    """Have forks wait for declarations and for the imports of builds. They take the two locks in the order of an op.py that builds:
    what runs before a fork runs in the opposite order of its registration.

    Again, after a module has registered something of its own: what is being imported may wait for the end of a fork that has come to
    that.
    """
    forks.watch()
    os.register_at_fork(before=_acquire, after_in_parent=_release, after_in_child=_renew)


watch()


def define(declared: Op) -> None:
    """Make the op known to torch: schema, fake kernel and stand-in. The caller holds `declaring`.

    Raises:
        DeclarationError: an op of that name is declared elsewhere, or torch does not take it.
    """
    from opjit import catalog

    qualified = declared.qualified
    known = catalog.declared(qualified)
    if known is not None and known is not declared:
        if known.library is not None and known.library != declared.library:
            raise DeclarationError(f"{qualified} was loaded from {known.library} before it was declared; import its declaration first, "
                                   "then call opjit.load_library")
        refuse_second(known, declared)
        forget(known)
    library = torch.library.Library(declared.schema.namespace, "FRAGMENT")
    try:
        _tell(library, declared)
    except RuntimeError as error:
        library._destroy()
        raise DeclarationError(f"torch does not take the op {qualified}, so choose another name or namespace: "
                               f"{str(error).splitlines()[0]}") from None
    except BaseException:  # an interrupt's traceback would keep the library, and torch the op
        library._destroy()
        raise
    declared.handle = library
    declared._register_backward()


def _tell(library: torch.library.Library, declared: Op) -> None:
    name = declared.schema.name
    library.define(declared.schema.text.partition("::")[2], tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, _stand_in(declared), "CompositeExplicitAutograd", with_keyset=True)
    if declared.schema.mutates:
        for key in ("Conjugate", "Negative"):
            library.impl(name, _refuse_lazy_views(declared.qualified), key)
    with _known_to_inspect():
        torch.library.register_fake(declared.qualified, _fake(declared), lib=library)


@contextmanager
def _known_to_inspect() -> Iterator[None]:
    """torch asks inspect which line registers a fake kernel. To say so, inspect would look for this module among all of torch's,
    2 ms, and read this file, 0.15 ms."""
    inspect.modulesbyfile.setdefault(__file__, __name__)
    read = linecache.cache.get(__file__)
    linecache.cache[__file__] = (0, None, ["\n"], __file__)
    try:
        yield
    finally:
        linecache.cache.pop(__file__)
        if read is not None:
            linecache.cache[__file__] = read


def refuse_second(known: Op, declared: Op) -> None:
    """Two ops may not have one name; a later declaration in the same place is the same op.

    Raises:
        DeclarationError: names both places.
    """
    one, other = (op.folder if op.code is None else op.code.module for op in (known, declared))
    if one != other:
        raise DeclarationError(f"two ops are named {declared.qualified}: one is declared in {known.where}, the other in {declared.where}; "
                               "rename one or give it a namespace of its own")


def redeclare(known: Op, newer: Op) -> None:
    """Give an op another schema: for torch it is another op, of the same name."""
    with declaring:
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
