"""opjit's errors: each is an OpjitError, and crosses to another process with its facts."""

import inspect
import pickle
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import opjit
from opjit import errors
from opjit.catalog import registry
from opjit.cli import main
from opjit.errors import OpjitError


class Elsewhere(OpjitError):
    """An error that opjit.errors does not define, like one of another package."""


EXAMPLES: list[OpjitError] = [
    errors.UnknownOp("opjit::x", ["y", "z"]),
    errors.SchemaError("a"),
    errors.DeclarationError("b"),
    errors.UnknownDevice("c"),
    errors.UnknownArch("d"),
    errors.DeviceUnavailable("e"),
    errors.NoKernel("f"),
    errors.ToolMissing("nvcc", "g"),
    errors.BuildError("h", op="o", target="t", command="gcc", log=Path("/log")),
    errors.CompileError("i", op="o", target="t"),
    errors.NotCached("i", op="o", target="t"),
    errors.LoadError("j"),
    errors.RemoteError("k"),
    errors.EntryError("l"),
    errors.UntrustedFolder("m"),
    errors.BadSetting("n"),
    errors.RecordError("p"),
    errors.PrecompileError("q", []),
    errors.PeerLost("r", "0", (1,), "opjit::x"),
    OpjitError("s"),
]


def test_every_error_class_has_an_example_here() -> None:
    classes = {
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, OpjitError)
    }
    assert {type(error) for error in EXAMPLES} == classes


@pytest.mark.parametrize(
    "error", [*EXAMPLES, Elsewhere("s")], ids=lambda error: type(error).__name__
)
def test_the_command_names_a_section_that_explains_the_error(
    error: OpjitError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def list_ops() -> list[object]:
        raise error

    monkeypatch.setattr(registry, "all_ops", list_ops)
    shown = CliRunner().invoke(main, ["list"]).output
    name = re.search(r"^Run `opjit help (\w+)` for causes and fixes\.$", shown, re.MULTILINE)
    assert name is not None, shown
    explained = CliRunner().invoke(main, ["help", name[1]])
    assert explained.exit_code == 0
    assert re.search(r"^ *Fix\. ", explained.output, re.MULTILINE), explained.output
    assert "**" not in explained.output
    assert issubclass(type(error), getattr(errors, name[1]))


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_every_error_is_an_opjit_error_and_survives_pickling_with_its_facts(
    error: OpjitError,
) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.__dict__ == error.__dict__
    assert isinstance(error, RuntimeError)


@pytest.mark.slow
def test_an_error_crosses_from_a_worker_process() -> None:
    import multiprocessing

    with (
        multiprocessing.get_context("spawn").Pool(1) as pool,
        pytest.raises(errors.UnknownOp, match="did you mean allreduce") as caught,
    ):
        pool.apply(opjit.get, ("allredduce",))
    assert caught.value.closest == ["allreduce"]
