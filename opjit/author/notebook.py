"""``%load_ext opjit`` and the cell magic ``%%opjit``: a cell of C or CUDA C becomes an op, and running it again reloads the op.

    %%opjit scale(Tensor x, float a) -> Tensor --like x
    opjit_status scale_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
    ...

Line numbers in messages are lines of the cell, because the source starts with an empty line instead of the magic."""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import click
import cloudpickle  # type: ignore[import-untyped]
import torch
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.display import display
from rich.box import SIMPLE
from rich.table import Table

from opjit import progress, request
from opjit.backends import Backend
from opjit.catalog import inline, registry, reload
from opjit.declare.declaration import Function
from opjit.declare.sample import Sample
from opjit.errors import BadSetting, OpjitError
from opjit.measure.plan import Arguments, Measurement
from opjit.measure.timing import measure, plan_of
from opjit.measure.units import format_time
from opjit.operators.op import Op
from opjit.tensors import bytes_of, tensors_of
from opjit.wanted import target_of

_WORD = r"""(?:"[^"]*"|'[^']*'|[^\s"'])+"""  # keeps quotes, which a schema may have
_FLAG_NAMES = "cflags cuda_cflags ldflags include"
_FLAGS = _FLAG_NAMES.split()  # in the order of `flags.check_flags`
_VALUE_NAMES = f"like fake reference test bench over arch {_FLAG_NAMES}"
_PARAMETERS: list[click.Parameter] = [
    click.Argument(["schema"], nargs=-1, required=True),
    click.Option(["--cuda"], is_flag=True),
    *(click.Option([f"--{name.replace('_', '-')}"]) for name in _VALUE_NAMES.split()),
]
_LINE = click.Command(
    "%%opjit",
    context_settings={"ignore_unknown_options": True},
    add_help_option=False,
    params=_PARAMETERS,
)


@magics_class
class OpjitMagics(Magics):
    @cell_magic
    def opjit(self, line: str, cell: str) -> None:
        """Compile the cell's C into an op, which later cells call by its name.

            %%opjit SCHEMA [--like X[,Y]] [--fake NAME] [--cuda] [--arch ARCH] [--reference NAME] [--test "ARGUMENTS"]
                    [--bench "ARGUMENTS"] [--over "NAME=VALUES"]
                    [--cflags "FLAGS"] [--cuda-cflags "FLAGS"] [--ldflags "FLAGS"] [--include FOLDER]

        SCHEMA           a torch schema, as in opjit.inline: scale(Tensor x, float a) -> Tensor
        --like X         the result has the shape, strides, dtype and device of the Tensor X; X,Y for two results.
                         torch.compile needs this or --fake.
        --fake NAME      a fake kernel that the notebook defines
        --cuda           the cell is CUDA C. (A cell may hold both: C, then a line `// cuda`, then CUDA C.)
        --reference NAME a function in plain torch with the same arguments, for --test and --bench
        --test "x, 2"    run the checks of `opjit test` with these and derived arguments
        --bench "x, 2"   time a call with these arguments, and the bandwidth that it reaches
        --over "n=2**10, 2**20"  a line for each value of a name in the arguments: --bench "torch.rand(n), 2"
        --arch sm_90     only compile a CUDA cell, for this architecture
        --cflags, ...    as in opjit.op; each is a list of flags in quotes

        If the cell runs again with other code, the op stays the same object and runs the new code everywhere. If the code does not
        compile, the cell shows the compiler's first error, and the op keeps its old code."""
        try:
            schema, options = parse(line)
            make = self._recipe(schema, options, split(cell, options["cuda"]))
            op = _declare(make(), options["arch"])
            self._names[op.schema.name] = op
            if options["test"]:
                reference = self._function("--reference", options["reference"])
                for text in check_sample(make, reference, *self._arguments(options["test"])):
                    print(text, end="", flush=True)  # as it comes
            if options["bench"]:
                self._bench(op, options)
        except OpjitError as error:
            shown = f"{type(error).__name__}: {error}"
            error._render_traceback_ = lambda: [shown]  # type: ignore[attr-defined]  # the traceback would show frames of opjit
            raise

    @property
    def _names(self) -> dict[str, Any]:
        assert self.shell is not None  # it registered the magic
        names: dict[str, Any] = self.shell.user_ns
        return names

    def _recipe(
        self, schema: str, options: Mapping[str, Any], sources: Mapping[str, str]
    ) -> Callable[[], Op]:
        fake = self._function("--fake", options["fake"]) if options["fake"] else None
        like = options["like"].split(",") if options["like"] else None
        flags = [shlex.split(options[name] or "") for name in _FLAGS]
        module = self._names.get("__name__", "__main__")
        return partial(
            inline.make, schema, sources, like, fake, module, "a notebook's cell", "cell", flags
        )

    def _bench(self, op: Op, options: Mapping[str, Any]) -> None:
        """Time calls, and the same calls of a reference, and show a table of medians."""
        given = options["bench"]
        sides: dict[str, Function] = {op.schema.name: op.overload}
        if options["reference"]:
            sides[options["reference"]] = self._function("--reference", options["reference"])
        if not options["over"]:
            name = "arguments"
            rows = {given: compare(sides, *self._arguments(given))}
        else:
            name, _, values = options["over"].partition("=")
            if not values:
                raise UsageError(
                    f"--over: expected a name and its numbers, for example n=2**10, 2**20, got {options['over']!r}"
                )
            rows = {
                f"{value:,}": compare(sides, *self._arguments(given, {name.strip(): value}))
                for value in eval(f"[{values}]", self._names)
            }
        display(table(name, list(sides), rows))

    def _arguments(self, text: str, more: Mapping[str, Any] = {}) -> Arguments:
        """Evaluate the arguments of a call in Python's notation, such as ``x, a=2.0``."""
        names = {**self._names, **more, "opjit_given": lambda *args, **kwargs: (args, kwargs)}
        return eval(f"opjit_given({text})", names)  # type: ignore[no-any-return]

    def _function(self, option: str, name: str) -> Function:
        """Find a function of the notebook, such as ``torch.add`` or a function that a cell defines."""
        try:
            found = eval(name, self._names)
        except Exception:  # it may raise any
            found = None
        if not callable(found):
            raise UsageError(f"{option} names {name!r}, which is not a function in this notebook")
        return found  # type: ignore[no-any-return]


def parse(line: str) -> tuple[str, dict[str, Any]]:
    """Split the magic's line into the schema and the options before or after it."""
    words = re.findall(_WORD, line)
    if re.sub(_WORD, "", line).strip():
        raise UsageError("%%opjit cannot read its line: a quotation mark is not closed")
    try:
        options = _LINE.make_context("%%opjit", words).params
    except click.UsageError as error:
        raise UsageError(f"%%opjit SCHEMA [OPTION]...: {error.format_message()}") from error
    schema = options.pop("schema")
    unknown = [word for word in schema if word.startswith("--")]
    if unknown:
        raise UsageError(f"%%opjit: unknown option {unknown[0]}; run %%opjit? to list the options")
    if options["over"] and not options["bench"]:
        raise UsageError("--over is about --bench, which the line does not have")
    if options["test"] and not options["reference"]:
        raise UsageError(
            "--test compares with a reference: --reference NAME, a function of the same arguments in plain torch"
        )
    return " ".join(schema), {
        name: re.sub(r"""^(['"])(.*)\1$""", r"\2", value) if isinstance(value, str) else value
        for name, value in options.items()
    }


def split(cell: str, cuda: bool) -> dict[str, str]:
    """Return the cell's sources by backend name, with the line numbers of the cell."""
    separator = re.search(r"^[ \t]*//[ \t]*cuda[ \t]*$", cell, flags=re.MULTILINE)
    if cuda or separator is None:
        return {"cuda" if cuda else "cpu": f"\n{cell}"}
    above = cell[: separator.end()]
    return {
        "cpu": f"\n{cell[: separator.start()]}",
        "cuda": "\n" * (1 + above.count("\n")) + cell[separator.end() :],
    }


def _declare(op: Op, arch: str | None) -> Op:
    assert op.declaration.code is not None
    sources = op.declaration.code.backends()
    missing = {backend.name: reason for backend in sources if (reason := backend.available())}
    if "cuda" in missing and arch:
        target = target_of("cuda", arch)
        started = time.perf_counter()
        request.entry(op, target)
        print(
            f"{op.qualified} for {target}: compiled in {time.perf_counter() - started:.2f} s; no GPU here runs it"
        )
        if len(sources) == 1:
            reload.install([op])
            return op
    present = [backend for backend in sources if backend.name not in missing]
    if not present:
        # The rest applies to ops in files only.
        reasons = [reason.partition("; ")[0] for reason in missing.values()]
        raise UsageError(
            f"there is no device for this cell: {'; '.join(reasons)}; --arch sm_90 only compiles it; without --cuda a "
            "cell is C, for the CPU"
        )
    return _build(op, present)


def _build(op: Op, present: list[Backend]) -> Op:
    started = time.perf_counter()
    status = display({"text/plain": f"{op.qualified}: building"}, raw=True, display_id=True)

    def show(text: str) -> None:
        status.update({"text/plain": text}, raw=True)

    try:
        with progress.on(progress.STATUS, show):
            [known] = reload.install([op], op.qualified, present)
    except BaseException:  # also an interrupt
        show(
            f"{op.qualified}: not built"
            + "; the previous version stays in use" * (registry.declared(op.qualified) is not None)
        )
        raise
    show(
        f"{known.qualified} for {' and '.join(backend.name for backend in present)}: ready in {time.perf_counter() - started:.2f} s"
    )
    return known


# The op, and perhaps a reference, by their names in the table.
Sides = Mapping[str, Function]


def check_sample(
    make: Callable[[], Op],
    reference: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Iterator[str]:
    """Yield the lines of `opjit test` as they come, for one sample. Raises BadSetting if cloudpickle cannot carry it."""
    sample = Sample(args, kwargs)
    device = next((each.device.type for each in sample.tensors()), "cpu")
    try:
        work = cloudpickle.dumps(
            partial(_print_table, make, reference, sample.map(torch.Tensor.cpu), device)
        )
    except Exception as error:  # of the objects
        raise BadSetting(
            f"--test runs the checks in another process, to which the reference, the fake kernel and the arguments cannot be "
            f"carried: {error}; use functions and values that pickle supports"
        ) from error
    code = "import pickle, sys; pickle.load(sys.stdin.buffer)()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(work)
            process.stdin.close()
            yield from (line.decode(errors="replace") for line in process.stdout)
        except BaseException:  # also an interrupt
            process.kill()
            raise


def _print_table(make: Callable[[], Op], reference: Function, sample: Sample, device: str) -> None:
    """Declare the op in the process, and print its table."""
    from opjit.author import test

    op = make()
    reload.install([op])
    op.reference(reference)
    op.samples(lambda where: iter([sample.map(lambda tensor: tensor.to(where))]))
    with click.Context(click.Command("test")) as context:
        context.color = True  # the notebook shows colors
        test.show_op(op, device)


def compare(sides: Sides, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Measurement]:
    """Time a call on each side, in turns. Raises AssertionError where the sides' results differ."""
    first, *others = [side(*args, **kwargs) for side in sides.values()]
    for other in others:
        torch.testing.assert_close(first, other, equal_nan=True)
    values = (args, kwargs, first)
    device = next((each.device.type for each in tensors_of(values)), "cpu")
    return list(measure(plan_of(sides, (args, kwargs), device, moved=bytes_of(values))).values())


def table(title: str, names: Sequence[str], rows: Mapping[str, Sequence[Measurement]]) -> Table:
    """Make a line for each call: time and bandwidth of each side, and the ratio of the op's time to the reference's."""
    lines = Table(title, box=SIMPLE, header_style="", show_edge=False)
    for name in names:
        lines.add_column(name, justify="right")
        lines.add_column("GB/s", justify="right")
    for _ in names[1:]:
        lines.add_column("ratio", justify="right")
    for label, sides in rows.items():
        cells = [
            text
            for side in sides
            for text in (format_time(side.median), f"{side.bytes / side.median / 1e9:.1f}")
        ]
        lines.add_row(
            label, *cells, *(f"{sides[0].median / other.median:.2f}" for other in sides[1:])
        )
    return lines


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magic; ``%load_ext opjit`` calls this."""
    shell.register_magics(OpjitMagics)
