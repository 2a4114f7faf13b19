"""Ops as command-line arguments: by name, or by the path of their folder."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from opjit.catalog import registry
from opjit.errors import UnknownOp
from opjit.operators.op import Op


def ops(text: str) -> list[Op]:
    """Return the op of a name or, if the text has a slash, the ops of a folder, which need not be on any path."""
    if os.sep in text or text in (".", ".."):
        return registry.add_trusted(Path(text))
    try:
        return [registry.find(text)]
    except UnknownOp as error:
        if (Path(text) / "op.py").is_file():
            error.args = (f"{error}; to name the directory {text}, write ./{text}",)
        raise


def ops_on_devices(
    texts: Iterable[str], device: str | None, say: Callable[[str], object]
) -> Iterator[tuple[Op, str]]:
    """Yield each op with a device to run it on; None is every device of this machine. Reports each op that runs on none of them."""
    for op in (op for text in texts for op in ops(text)):
        devices = [device] if device else op.devices()
        if not devices:
            say(without_device(op))
        yield from ((op, each) for each in devices)


def without_device(op: Op) -> str:
    """Return the report of an op that no device of this machine can run."""
    return f"{op.qualified} runs on no device of this machine: it has kernels for {' and '.join(op.backends()) or 'nothing'}"
