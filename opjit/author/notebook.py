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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn, cast

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.display import Image, display

from opjit import backends, progress, request
from opjit.backends import Backend
from opjit.declare import registry
from opjit.declare.op import Op
from opjit.errors import OpjitError
from opjit.live import inline, reload
from opjit.wanted import target_of

_SEPARATOR = re.compile(r"^[ \t]*//[ \t]*cuda[ \t]*$", re.MULTILINE)
_WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")  # keeps quotes, which a schema may have
_COLOURS = tuple((re.compile(pattern, re.MULTILINE), colour) for pattern, colour in (
    (r"^cell(\(\d+\)|[:\d]*):", 1), (r"\berror:", "1;31"), (r"\bwarning:", "1;35"), (r"\bnote:", "1;36"), (r"(?<=\|) *[\^~]+ *$", "1;31")))
_FLAGS = {"extra_cflags": "--cflags", "extra_cuda_cflags": "--cuda-cflags", "extra_ldflags": "--ldflags",
          "extra_include_paths": "--include"}
_SWITCHES = ("--cuda", "--plot")
_OPTIONS = ("--like", "--fake", "--test", "--bench", "--over", "--reference", "--arch", *_FLAGS.values())


@magics_class
class OpjitMagics(Magics):
    @cell_magic
    def opjit(self, line: str, cell: str) -> None:
        """Compile the cell's C into an op, which later cells call by its name.

            %%opjit SCHEMA [--like X[,Y]] [--fake NAME] [--cuda] [--arch ARCH] [--reference NAME] [--test "ARGUMENTS"]
                    [--bench "ARGUMENTS"] [--over "NAME=VALUES"] [--plot]
                    [--cflags "FLAGS"] [--cuda-cflags "FLAGS"] [--ldflags "FLAGS"] [--include FOLDER]

        SCHEMA           a torch schema, as in opjit.inline: scale(Tensor x, float a) -> Tensor
        --like X         the result has the shape, strides, dtype and device of the Tensor X; X,Y for two results.
                         torch.compile needs this or --fake.
        --fake NAME      a fake kernel that the notebook defines
        --cuda           the cell is CUDA C. (A cell may hold both: C, then a line `// cuda`, then CUDA C.)
        --reference NAME a function of the same arguments, in plain torch, that --test and --bench compare with
        --test "x, 2"    run the checks of `opjit test` with these arguments, and with others made from them
        --bench "x, 2"   time a call with these arguments, and the bandwidth that it reaches
        --over "n=2**10, 2**20"  a line for each value of a name in the arguments: --bench "torch.rand(n), 2"
        --plot           draw the bandwidths (needs matplotlib)
        --arch sm_90     where no GPU is, only compile a CUDA cell, for this arch
        --cflags and others: as in opjit.op; each takes a list of flags in quotes

        If the cell runs again with other code, the op stays the same object and runs the new code everywhere. If the code does not
        compile, the cell shows the compiler's first error, and the op keeps its old code.
        """
        try:
            schema, options = _parse(line)
            _check_dependent_options(options)
            make = self._recipe(schema, options, _split(cell, "--cuda" in options))
            op = _declare(make(), options)
            self._names[op.schema.name] = op
            if "--test" in options:
                self._test(make, options)
            if "--bench" in options:
                self._bench(op, options)
        except OpjitError as error:
            _raise_without_traceback(error)

    @property
    def _names(self) -> dict[str, Any]:
        """The notebook's variables."""
        assert self.shell is not None  # it registered the magic
        names: dict[str, Any] = self.shell.user_ns
        return names

    def _recipe(self, schema: str, options: Mapping[str, str], sources: Mapping[str, str]) -> Callable[[], Op]:
        """Return a function that makes the op, in another process too."""
        fake = None
        if "--fake" in options:
            fake = self._function("--fake", options["--fake"])
        like = options["--like"].split(",") if "--like" in options else None
        flags: dict[str, Any] = {parameter: shlex.split(options.get(name, "")) for parameter, name in _FLAGS.items()}
        module = self._names.get("__name__", "__main__")
        return partial(inline.make, schema, sources, like, fake, module, "a notebook's cell", "cell", **flags)

    def _test(self, make: Callable[[], Op], options: Mapping[str, str]) -> None:
        """Print the table of checks, as it comes."""
        from opjit.author import cells

        for line in cells.check(make, self._function("--reference", options["--reference"]), *self._arguments(options["--test"])):
            print(line, end="", flush=True)

    def _bench(self, op: Op, options: Mapping[str, str]) -> None:
        """Time calls, and the same calls of a reference, and show a table of medians."""
        from opjit.author import cells
        from opjit.author.bench import require_matplotlib

        if "--plot" in options:
            require_matplotlib()
        given, sides = options["--bench"], {op.schema.name: cast("Callable[..., Any]", op.overload)}
        if "--reference" in options:
            sides[options["--reference"]] = self._function("--reference", options["--reference"])
        name, values = self._over(options.get("--over"))
        calls = [cells.TimedCall(f"{value:,}" if name else given, value, *self._arguments(given, {name: value} if name else {}))
                 for value in values]
        rows = [cells.compare(sides, call) for call in calls]
        display(cells.table(name or "arguments", list(sides), rows))
        if "--plot" in options:
            display(Image(cells.plot(name or given, list(sides), rows)))

    def _arguments(self, text: str, more: Mapping[str, Any] = MappingProxyType({})) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Evaluate the arguments of a call in Python's notation, such as ``x, a=2.0``."""
        names = {**self._names, **more, "opjit_given": lambda *args, **kwargs: (args, kwargs)}
        return eval(f"opjit_given({text})", names)  # type: ignore[no-any-return]

    def _over(self, text: str | None) -> tuple[str, Sequence[Any]]:
        """Evaluate a name and its values; without --over, no name and one value."""
        if text is None:
            return "", [0]
        name, _, values = text.partition("=")
        found = self._value(f"[{values}]") or []
        if not name.strip().isidentifier() or not found or not all(isinstance(value, (int, float)) for value in found):
            raise UsageError(f"--over takes a name and its numbers, such as n=2**10, 2**20; it has {text!r}")
        return name.strip(), found

    def _function(self, option: str, name: str) -> Callable[..., Any]:
        """Find a function of the notebook, such as ``torch.add`` or one that a cell defines."""
        found = self._value(name)
        if not callable(found):
            raise UsageError(f"{option} names {name!r}, which is not a function in this notebook")
        return found  # type: ignore[no-any-return]

    def _value(self, text: str) -> Any:
        """Return the value of an expression in the notebook, or None where it has none."""
        try:
            return eval(text, dict(self._names))
        except Exception:  # it may raise any
            return None


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


def _check_dependent_options(options: Mapping[str, str]) -> None:
    for name, others in (("--over", ["--bench"]), ("--plot", ["--bench"]), ("--reference", ["--bench", "--test"])):
        if name in options and not any(other in options for other in others):
            raise UsageError(f"{name} is about {' and '.join(others)}, which the line does not have")
    if "--test" in options and "--reference" not in options:
        raise UsageError("--test compares with a reference: --reference NAME, a function of the same arguments in plain torch")


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _split(cell: str, cuda: bool) -> dict[str, str]:
    """Return the cell's sources by backend name, with the line numbers of the cell."""
    separator = _SEPARATOR.search(cell)
    if cuda or separator is None:
        return {"cuda" if cuda else "cpu": f"\n{cell}"}
    above = cell[:separator.end()]
    return {"cpu": f"\n{cell[:separator.start()]}", "cuda": "\n" * (1 + above.count("\n")) + cell[separator.end():]}


def _declare(op: Op, options: Mapping[str, str]) -> Op:
    """Build the op for the devices of its code, and declare it."""
    assert op.code is not None
    sources = [backend.name for backend in backends.all_backends() if backend.suffix in op.code.texts]
    missing = {name: backends.for_device(name).available() for name in sources}
    if missing.get("cuda") and "--arch" in options:
        _compile(op, options["--arch"])
        if len(missing) == 1:
            reload.install([op])
            return op
    if all(missing.values()):
        reasons = [reason.partition("; ")[0] for reason in missing.values() if reason]  # the rest applies to ops in files only
        raise UsageError(f"there is no device for this cell: {'; '.join(reasons)}; --arch sm_90 only compiles it; without --cuda a "
                         "cell is C, for the CPU")
    return _build(op, [backends.for_device(name) for name, reason in missing.items() if reason is None])


def _compile(op: Op, arch: str) -> None:
    """Build the CUDA kernel for an arch, into the cache."""
    target = target_of("cuda", arch)
    started = time.perf_counter()
    request.entry(op, target)
    print(f"{op.qualified} for {target}: compiled in {time.perf_counter() - started:.2f} s; no GPU here runs it")


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
        show(f"{op.qualified}: not built" + "; the previous version stays in use" * (registry.declared(op.qualified) is not None))
        raise
    known = registry.declared(op.qualified)
    assert known is not None  # `install` declared it
    show(f"{known.qualified} for {' and '.join(backend.name for backend in present)}: ready in {time.perf_counter() - started:.2f} s")
    return known


def _raise_without_traceback(error: OpjitError) -> NoReturn:
    """Show only the message in the notebook, in a compiler's colours: the traceback would be opjit's own."""
    error._render_traceback_ = lambda: [_coloured(f"{type(error).__name__}: {error}")]  # type: ignore[attr-defined]
    raise error


def _coloured(text: str) -> str:
    """Return a compiler's message with the colours that gcc has on a terminal: opjit reads it from a pipe, which gets none."""
    for pattern, colour in _COLOURS:
        text = pattern.sub(f"\x1b[{colour}m\\g<0>\x1b[0m", text)
    return text


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magic; ``%load_ext opjit`` calls this."""
    shell.register_magics(OpjitMagics)
    terminal = getattr(shell, "pt_app", None)
    if terminal is not None:  # IPython's own prompt; a notebook's page highlights cells without asking the kernel
        from prompt_toolkit.lexers import PygmentsLexer
        from pygments.lexers.c_cpp import CLexer  # type: ignore[import-untyped]

        terminal.lexer.magic_lexers["opjit"] = PygmentsLexer(CLexer)
