"""``%load_ext opjit`` and the cell magic ``%%opjit``: a cell of C or CUDA C becomes an op, and running it again reloads the op.

    %%opjit scale(Tensor x, float a) -> Tensor --like x
    opjit_status scale_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
    ...

Line numbers in messages are those of the cell: the source starts with an empty line in place of the magic's.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.display import display

from opjit import backends, progress
from opjit.backends import Backend
from opjit.builder import torch_builder
from opjit.declare import catalog
from opjit.declare.op import Op
from opjit.errors import OpjitError
from opjit.live import inline, reload

_SEPARATOR = re.compile(r"^[ \t]*//[ \t]*cuda[ \t]*$", re.MULTILINE)
_WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")  # keeps quotes, which a schema may have
_SWITCHES = ("--cuda",)
_OPTIONS = ("--like", "--fake", "--bench", "--cflags", "--cuda-cflags", "--ldflags", "--include")


@magics_class
class OpjitMagics(Magics):
    @cell_magic
    def opjit(self, line: str, cell: str) -> None:
        """Compile the cell's C into an op, which later cells call by its name.

            %%opjit SCHEMA [--like X[,Y]] [--fake NAME] [--cuda] [--bench "ARGUMENTS"]
                    [--cflags "FLAGS"] [--cuda-cflags "FLAGS"] [--ldflags "FLAGS"] [--include FOLDER]

        SCHEMA           a torch schema, as in opjit.inline: scale(Tensor x, float a) -> Tensor
        --like X         the result has the shape, strides, dtype and device of the Tensor X; X,Y for two results.
                         torch.compile needs this or --fake.
        --fake NAME      a fake kernel that the notebook defines
        --cuda           the cell is CUDA C. (A cell may hold both: C, then a line `// cuda`, then CUDA C.)
        --bench "x, 2"   time a call with these arguments
        --cflags and others: as in opjit.op; each takes a list of flags in quotes

        If the cell runs again with other code, the op stays the same object and runs the new code everywhere. If the code does not
        compile, the cell shows the compiler's first error, and the op keeps its old code.
        """
        try:
            schema, options = _parse(line)
            op = self._declare(schema, options, _split(cell, "--cuda" in options))
        except OpjitError as error:
            _raise_without_traceback(error)
        self._names[op.schema.name] = op
        if "--bench" in options:
            self._bench(op, options["--bench"])

    @property
    def _names(self) -> dict[str, Any]:
        """The notebook's variables."""
        assert self.shell is not None  # it registered the magic
        names: dict[str, Any] = self.shell.user_ns
        return names

    def _declare(self, schema: str, options: Mapping[str, str], sources: Mapping[str, str]) -> Op:
        fake = None
        if "--fake" in options:
            fake = self._names.get(options["--fake"])
            if not callable(fake):
                raise UsageError(f"--fake names {options['--fake']!r}, which is not a function in this notebook")
        like = options["--like"].split(",") if "--like" in options else None
        flags = {name: shlex.split(options.get(name, "")) for name in ("--cflags", "--cuda-cflags", "--ldflags", "--include")}
        op = inline.make(schema, sources, like, fake, self._names.get("__name__", "__main__"), "a notebook's cell", "cell",
                         flags["--cflags"], flags["--cuda-cflags"], flags["--ldflags"], flags["--include"])
        missing = {name: backends.for_device(name).available() for name in sources}
        if all(missing.values()):
            reasons = [reason.partition("; ")[0] for reason in missing.values() if reason]  # the rest applies to ops in files only
            raise UsageError(f"there is no device for this cell: {'; '.join(reasons)}; without --cuda a cell is C, for the CPU")
        return _build(op, [backends.for_device(name) for name, reason in missing.items() if reason is None])

    def _bench(self, op: Op, arguments: str) -> None:
        """Time a call and print the median."""
        torch_builder.import_quietly()  # the timer would import it, with a warning
        from torch.utils.benchmark import Timer

        namespace = {**self._names, "opjit_called": op.overload}
        measured = Timer(f"opjit_called({arguments})", globals=namespace).blocked_autorange(min_run_time=0.2)
        seconds = measured.median
        unit, size = next((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 0.0)) if seconds >= size)
        print(f"{op.schema.name}({arguments}): {seconds / (size or 1e-9):.3g} {unit} a call, median of {len(measured.times)} rounds of "
              f"{measured.number_per_run}, {measured.num_threads} thread{'s' * (measured.num_threads != 1)}")


def _parse(line: str) -> tuple[str, dict[str, str]]:
    """Split the magic's line into the schema and the options before or after it."""
    words = _WORD.findall(line)
    if _WORD.sub("", line).strip():
        raise UsageError("%%opjit cannot read its line: a quotation mark is not closed")
    schema: list[str] = []
    options: dict[str, str] = {}
    while words:
        name, equals, value = words.pop(0).partition("=")
        if not name.startswith("--"):
            schema.append(f"{name}{equals}{value}")
        elif name in _SWITCHES and not equals:
            options[name] = ""
        elif name in _OPTIONS and (equals or words):
            options[name] = _unquoted(value if equals else words.pop(0))
        else:
            raise UsageError(f"%%opjit does not know {name}{' without a value' * (name in _OPTIONS)}; it takes a schema and "
                             f"{', '.join((*_SWITCHES, *_OPTIONS))}; see %%opjit?")
    if not schema:
        raise UsageError("%%opjit takes a schema: %%opjit scale(Tensor x, float a) -> Tensor --like x")
    return " ".join(schema), options


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _split(cell: str, cuda: bool) -> dict[str, str]:
    """The cell's sources by backend name, with the line numbers of the cell."""
    separator = _SEPARATOR.search(cell)
    if cuda or separator is None:
        return {"cuda" if cuda else "cpu": f"\n{cell}"}
    above = cell[:separator.end()]
    return {"cpu": f"\n{cell[:separator.start()]}", "cuda": "\n" * (1 + above.count("\n")) + cell[separator.end():]}


def _build(op: Op, present: list[Backend]) -> Op:
    """Install the op for each device, with a status line below the cell."""
    started = time.perf_counter()
    status = display({"text/plain": f"{op.qualified}: building"}, raw=True, display_id=True)

    def show(text: str) -> None:
        status.update({"text/plain": text}, raw=True)

    try:
        with progress.on_status(show):
            reload.install([op], op.qualified, present)
    except BaseException:  # also an interrupt
        show(f"{op.qualified}: not built" + "; the previous version stays in use" * (catalog.declared(op.qualified) is not None))
        raise
    known = catalog.declared(op.qualified)
    assert known is not None  # `install` declared it
    show(f"{known.qualified} for {' and '.join(backend.name for backend in present)}: ready in {time.perf_counter() - started:.2f} s")
    return known


def _raise_without_traceback(error: OpjitError) -> NoReturn:
    """Show only the message in the notebook, as the traceback would be opjit's own."""
    error._render_traceback_ = lambda: [f"{type(error).__name__}: {error}"]  # type: ignore[attr-defined]
    raise error


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Called by ``%load_ext opjit``."""
    shell.register_magics(OpjitMagics)
