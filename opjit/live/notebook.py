"""``%load_ext opjit`` and the cell magic ``%%opjit``: a cell of C or CUDA C is an op, and running it again is a hot reload.

    %%opjit scale(Tensor x, float a) -> Tensor --like x
    opjit_status scale_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
    ...

Line numbers in messages are the cell's: the source starts with an empty line for the magic's own.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.display import display

from opjit import backends, build, catalog, inlined, progress, reload
from opjit.backends import Backend
from opjit.errors import OpjitError
from opjit.op import Op

_SEPARATOR = re.compile(r"^[ \t]*//[ \t]*cuda[ \t]*$", re.MULTILINE)
_WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")  # quotes and all: a schema has quotes of its own
_SWITCHES = ("--cuda",)
_VALUED = ("--like", "--fake", "--bench", "--cflags", "--cuda-cflags", "--ldflags", "--include")


class _Request(NamedTuple):
    """The magic's line."""

    schema: str
    options: dict[str, str]


@magics_class
class OpjitMagics(Magics):
    @cell_magic
    def opjit(self, line: str, cell: str) -> None:
        """Make the cell's C an op, and call it by its name in the cells below.

            %%opjit SCHEMA [--like X[,Y]] [--fake NAME] [--cuda] [--bench "ARGUMENTS"]
                    [--cflags "FLAGS"] [--cuda-cflags "FLAGS"] [--ldflags "FLAGS"] [--include FOLDER]

        SCHEMA           a torch schema, as opjit.inline takes it: scale(Tensor x, float a) -> Tensor
        --like X         the result is an empty_like of the Tensor X; X,Y for two results. torch.compile needs this or --fake
        --fake NAME      a fake kernel defined in the notebook
        --cuda           the cell is CUDA C. (A cell may hold both: C, then a line `// cuda`, then CUDA C.)
        --bench "x, 2"   afterwards, time a call with these arguments
        --cflags and others: as opjit.op takes them, each a list of flags in quotes

        Run again with other code, the op stays the same object and runs the new code from then on, wherever it is held. Where the
        code is wrong, the compiler's first complaint is shown, and the op stays as it was.
        """
        try:
            request = _parse(line)
            sources = _split(cell, "--cuda" in request.options)
            op = self._declare(request, sources)
        except OpjitError as error:
            _raise_plainly(error)
        self._names[op.schema.name] = op
        if "--bench" in request.options:
            self._bench(op, request.options["--bench"])

    @property
    def _names(self) -> dict[str, Any]:
        """The notebook's variables."""
        assert self.shell is not None  # it registered the magic
        names: dict[str, Any] = self.shell.user_ns
        return names

    def _declare(self, request: _Request, sources: Mapping[str, str]) -> Op:
        options = request.options
        fake = None
        if "--fake" in options:
            fake = self._names.get(options["--fake"])
            if not callable(fake):
                raise UsageError(f"--fake names {options['--fake']!r}, which is no function of this notebook")
        like = options["--like"].split(",") if "--like" in options else None
        flags = {name: shlex.split(options.get(name, "")) for name in ("--cflags", "--cuda-cflags", "--ldflags", "--include")}
        op = inlined.make(request.schema, sources, like, fake, self._names.get("__name__", "__main__"), "a notebook's cell", "cell",
                          flags["--cflags"], flags["--cuda-cflags"], flags["--ldflags"], flags["--include"])
        missing = {name: backends.for_device(name).available() for name in sources}
        if all(missing.values()):
            reasons = [reason.partition("; ")[0] for reason in missing.values() if reason]  # what may follow is for ops in files
            raise UsageError(f"there is no device for this cell: {'; '.join(reasons)}; without --cuda a cell is C, for the CPU")
        return _built(op, [backends.for_device(name) for name, reason in missing.items() if reason is None])

    def _bench(self, op: Op, arguments: str) -> None:
        """Time a call; its result is thrown away."""
        build.import_builder(whole=True)  # as the timer would, with a remark
        from torch.utils.benchmark import Timer

        namespace = {**self._names, "opjit_called": op.overload}
        measured = Timer(f"opjit_called({arguments})", globals=namespace).blocked_autorange(min_run_time=0.2)
        seconds = measured.median
        unit, size = next((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 0.0)) if seconds >= size)
        print(f"{op.schema.name}({arguments}): {seconds / (size or 1e-9):.3g} {unit} a call, median of {len(measured.times)} rounds of "
              f"{measured.number_per_run}, {measured.num_threads} thread{'s' * (measured.num_threads != 1)}")


def _parse(line: str) -> _Request:
    """Split the magic's line into the schema and the options, which may stand before or behind it."""
    words = _WORD.findall(line)
    if _WORD.sub("", line).strip():
        raise UsageError("%%opjit cannot read its line: a quotation mark in it has no second one")
    schema: list[str] = []
    options: dict[str, str] = {}
    while words:
        name, equals, value = words.pop(0).partition("=")
        if not name.startswith("--"):
            schema.append(f"{name}{equals}{value}")
        elif name in _SWITCHES and not equals:
            options[name] = ""
        elif name in _VALUED and (equals or words):
            options[name] = _unquoted(value if equals else words.pop(0))
        else:
            raise UsageError(f"%%opjit does not know {name}{' without a value' * (name in _VALUED)}; it takes a schema and "
                             f"{', '.join((*_SWITCHES, *_VALUED))}; see %%opjit?")
    if not schema:
        raise UsageError("%%opjit takes a schema: %%opjit scale(Tensor x, float a) -> Tensor --like x")
    return _Request(" ".join(schema), options)


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _split(cell: str, cuda: bool) -> dict[str, str]:
    """The cell's sources by backend name, each line where it is in the cell, whose first one is the magic's."""
    separator = _SEPARATOR.search(cell)
    if cuda or separator is None:
        return {"cuda" if cuda else "cpu": f"\n{cell}"}
    above = cell[:separator.end()]
    return {"cpu": f"\n{cell[:separator.start()]}", "cuda": "\n" * (1 + above.count("\n")) + cell[separator.end():]}


def _built(op: Op, present: list[Backend]) -> Op:
    """Put the op in place for each device, with a line that tells what happens and, in the end, what did."""
    started = time.perf_counter()
    say = _line()
    try:
        with progress.told(say):
            reload.put([op], op.qualified, present)
    except BaseException:  # also an interrupt: nothing is being built any more
        say(f"{op.qualified}: not built" + "; the version before stays in use" * (catalog.declared(op.qualified) is not None))
        raise
    known = catalog.declared(op.qualified)
    assert known is not None  # `put` declared it
    say(f"{known.qualified} for {' and '.join(backend.name for backend in present)}: ready in {time.perf_counter() - started:.2f} s")
    return known


def _line() -> Callable[[str], None]:
    """A function that shows a text in the place of the one before, under the cell."""
    shown: list[Any] = []

    def say(text: str) -> None:
        content = {"text/plain": text}
        if shown:
            shown[0].update(content, raw=True)
        else:
            shown.append(display(content, raw=True, display_id=True))

    return say


def _raise_plainly(error: OpjitError) -> NoReturn:
    """Let the notebook show the message alone: the traceback would be of opjit's own lines."""
    error._render_traceback_ = lambda: [f"{type(error).__name__}: {error}"]  # type: ignore[attr-defined]
    raise error


def load_ipython_extension(shell: InteractiveShell) -> None:
    """What ``%load_ext opjit`` calls."""
    shell.register_magics(OpjitMagics)
