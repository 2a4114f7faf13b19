"""The ops that come with opjit, which its import declares."""

import os
from pathlib import Path

import pytest

import opjit
from opjit.errors import UnknownOp
from tests.helpers import BUNDLED, fresh

# Runs functions in a thread each, at once, and raises what they raise.
TOGETHER = """
import sys, threading
sys.setswitchinterval(1e-6)
def together(calls):
    gate, results, wrong = threading.Barrier(len(calls)), [], []
    def run(call):
        gate.wait()
        try:
            results.append(call())
        except BaseException as error:
            wrong.append(error)
    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert not wrong, wrong
    return results
"""


@pytest.mark.torch
def test_importing_opjit_declares_every_bundled_op_to_torch_so_that_c_plus_plus_finds_it_too(
    here: Path,
) -> None:
    fresh(f"""
import torch
space = torch.ops.opjit
assert not hasattr(space, "allreduce")
import opjit
assert space is torch.ops.opjit and space.allreduce(torch.ones(3)).item() == 3
found = {{name: torch._C._jit_get_operation(name)[0] for name in {BUNDLED!r}}}
assert all(found.values()), found
for name in found:
    op = opjit.registry.find(name)
    assert op.qualified == name and op is opjit.registry.find(op.schema.name)
    assert op.overload is getattr(torch.ops.opjit, op.schema.name).default
    assert op.schema.name in dir(torch.ops.opjit)  # completion offers it
""")


def test_all_threads_get_one_overload_of_an_op(here: Path) -> None:
    fresh(
        TOGETHER
        + f"""
import torch, opjit
for name in {[name.removeprefix("opjit::") for name in BUNDLED]!r}:
    ways = [lambda: getattr(torch.ops.opjit, name).default, lambda: opjit.registry.find(name).overload]
    got = together([ways[i % 2] for i in range(8)])
    assert len(got) == 8 and len(set(map(id, got))) == 1, name
"""
    )


def test_a_child_that_is_forked_while_an_op_is_declared_has_it_too(here: Path) -> None:
    fresh("""
import os, threading, time
import torch, opjit
from opjit.operators import registration
register, half = registration._register, threading.Event()
def slowly(library, declared):
    register(library, declared)
    half.set()
    time.sleep(0.3)
def same(x):
    return torch.empty_like(x)
registration._register = slowly
thread = threading.Thread(target=lambda: opjit.op("bundletest::same(Tensor x) -> Tensor")(same))
thread.start()
half.wait()
child = os.fork()
if child == 0:
    try:
        found = opjit.registry.find("bundletest::same")
        os._exit(found(torch.ones(3, device="meta")).shape != (3,))
    except BaseException:
        os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
thread.join()
assert torch.ops.bundletest.same(torch.ones(3, device="meta")).shape == (3,)
""")


def test_threads_that_declare_one_op_again_and_again_are_no_trouble_to_each_other(
    here: Path,
) -> None:
    fresh(
        TOGETHER
        + """
import torch, opjit
def f(x):
    return torch.empty_like(x)
for _ in range(60):
    together([lambda: opjit.op("bundletest::f(Tensor x) -> Tensor")(f)] * 2)
assert torch.ops.bundletest.f(torch.ones(3, device="meta")).shape == (3,)
"""
    )


@pytest.mark.torch
@pytest.mark.slow
def test_an_exported_program_runs_where_only_opjit_was_imported(here: Path) -> None:
    program = here.with_name("program.pt2")
    fresh(f"""
import torch, opjit
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.ops.opjit.round_ste(x) + torch.ops.opjit.allreduce(x)
batch = torch.export.Dim("batch", min=2, max=100)
exported = torch.export.export(Model(), (torch.rand(3, 4),), dynamic_shapes={{"x": {{0: batch}}}})
assert {{"opjit.round_ste.default", "opjit.allreduce.default"}} <= {{str(node.target) for node in exported.graph.nodes}}
torch.export.save(exported, {os.fspath(program)!r})
""")
    assert not list(here.rglob("manifest.json")), "nothing is built for it"
    fresh(f"""
import torch, opjit
x = torch.rand(5, 4)
torch.testing.assert_close(torch.export.load({os.fspath(program)!r}).module()(x), (x > 0.5).float() + x.sum())
""")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "mylib::softmax_of_mine",
            r"declare its directory with opjit\.add_path\(DIR\) or OPJIT_PATH",
        ),
        ("./softmax", r"expected a name, got a path: call opjit\.add_path with the path"),
    ],
)
def test_an_unknown_op_that_resembles_no_other_is_answered_with_the_way_to_declare_it(
    name: str, told: str
) -> None:
    with pytest.raises(UnknownOp, match=told):
        opjit.get(name, "cpu")


@pytest.mark.parametrize("name", ["allredduce", "opjit::all_reduce", "Allreduce"])
def test_an_unknown_op_is_answered_with_the_closest_names(name: str) -> None:
    with pytest.raises(
        UnknownOp, match=r"no op named 'opjit::.*'.*did you mean .*allreduce"
    ) as caught:
        opjit.get(name, "cpu")
    assert "allreduce" in caught.value.closest
    assert "lltm_forward" not in caught.value.closest
    assert isinstance(caught.value, KeyError)


def test_an_unknown_op_like_no_other_is_answered_with_the_command_that_lists_them() -> None:
    with pytest.raises(UnknownOp, match="opjit list"):
        opjit.get("zzzzzzzz")


def test_an_import_of_opjit_imports_no_tool_and_none_of_torch_s_compilers() -> None:
    """A bundled op's op.py runs with each import: `opjit.distributed` is imported when it is used."""
    code = "import sys, torch, opjit\nprint(sorted(each for each in {!r} if each in sys.modules))"
    tools = ["opjit.distributed", "opjit.cpp_extension", "opjit.testing", "torch._dynamo"]
    assert fresh(code.format(tools)).stdout == "[]\n"
