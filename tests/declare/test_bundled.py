"""The ops that come with opjit: declared when they are first named, by whichever way and thread."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests import helpers
from tests.helpers import BUNDLED

# What has run of kernels_c.
RAN = """
import sys
import torch

def ran():
    return sorted(name.removeprefix("opjit_bundled_") for name in sys.modules if name.startswith("opjit_bundled_"))
"""


# Runs functions in a thread each, at once; whatever one raises is raised.
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


def fresh(code: str, tmp_path: Path) -> str:
    return helpers.fresh(code, {"OPJIT_CACHE": str(tmp_path / "cache")}).stdout


def test_importing_opjit_declares_no_op_and_naming_one_declares_those_of_its_folder(tmp_path: Path) -> None:
    fresh(RAN + """
import opjit
assert ran() == []
assert not torch._C._jit_get_operation("opjit::lltm_forward")[0]
forward = torch.ops.opjit.lltm_forward
assert ran() == ["lltm"]
assert forward is torch.ops.opjit.lltm_forward and forward.default._schema.name == "opjit::lltm_forward"
assert torch.ops.opjit.lltm_backward.default._schema.name == "opjit::lltm_backward"
assert ran() == ["lltm"]
""", tmp_path)


@pytest.mark.parametrize("qualified", BUNDLED)
def test_every_bundled_op_is_found_by_its_own_name(qualified: str, tmp_path: Path) -> None:
    name = qualified.removeprefix("opjit::")
    fresh(RAN + f"""
import opjit
assert opjit.catalog.find({name!r}).qualified == {qualified!r}
assert len(ran()) == 1, ran()
assert getattr(torch.ops.opjit, {name!r}).default is opjit.catalog.find({qualified!r}).overload
""", tmp_path)


def test_who_had_torch_s_namespace_before_opjit_was_imported_finds_the_ops_in_it(tmp_path: Path) -> None:
    fresh("""
import torch
space = torch.ops.opjit
assert not hasattr(space, "allreduce")
import opjit
assert space is torch.ops.opjit
assert space.allreduce(torch.ones(3)).item() == 3
""", tmp_path)


def test_a_name_that_no_op_has_is_torch_s_own_error(tmp_path: Path) -> None:
    said = fresh("""
import torch, opjit
for name in ("lltm", "allreduce_twice", "__wrapped__"):
    try:
        getattr(torch.ops.opjit, name)
    except AttributeError as error:
        print(error)
""", tmp_path)
    assert len(said.splitlines()) == 3
    assert "'opjit' object has no attribute 'allreduce_twice'" in said


def test_threads_that_name_one_op_at_once_all_get_it_with_its_gradient(tmp_path: Path) -> None:
    fresh(TOGETHER + """
import torch, opjit

def use(get):
    x = torch.ones(4, requires_grad=True)
    get()(x).backward()
    assert x.grad.tolist() == [1.0] * 4

ways = [lambda: torch.ops.opjit.allreduce, lambda: opjit.get("allreduce", "cpu"), lambda: opjit.catalog.find("opjit::allreduce")]
together([lambda way=ways[i % 3]: use(way) for i in range(8)])
""", tmp_path)


def test_all_threads_get_one_overload_of_an_op(tmp_path: Path) -> None:
    fresh(TOGETHER + f"""
import torch, opjit
for name in {[name.removeprefix("opjit::") for name in BUNDLED]!r}:
    ways = [lambda: getattr(torch.ops.opjit, name).default, lambda: opjit.catalog.find(name).overload]
    got = together([ways[i % 2] for i in range(8)])
    assert len(got) == 8 and len(set(map(id, got))) == 1, name
""", tmp_path)


def test_a_child_that_is_forked_while_an_op_is_declared_has_it_too(tmp_path: Path) -> None:
    fresh("""
import os, threading, time
import torch, opjit
from opjit import registration
tell, half = registration._tell, threading.Event()

def slowly(library, declared):
    tell(library, declared)
    half.set()
    time.sleep(0.3)

registration._tell = slowly
thread = threading.Thread(target=lambda: torch.ops.opjit.round_ste)
thread.start()
half.wait()
child = os.fork()
if child == 0:
    try:
        os._exit(torch.ops.opjit.round_ste(torch.ones(3)).tolist() != [1.0] * 3)
    except BaseException:
        os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
thread.join()
assert torch.ops.opjit.round_ste(torch.ones(3)).tolist() == [1.0] * 3
""", tmp_path)


def test_threads_that_declare_one_op_again_and_again_are_no_trouble_to_each_other(tmp_path: Path) -> None:
    fresh(TOGETHER + """
import torch, opjit

def f(x):
    return torch.empty_like(x)

for _ in range(60):
    together([lambda: opjit.op("bundletest::f(Tensor x) -> Tensor")(f)] * 2)
assert torch.ops.bundletest.f(torch.ones(3, device="meta")).shape == (3,)
""", tmp_path)


def test_a_bundled_folder_that_is_added_as_a_path_is_declared_once(tmp_path: Path) -> None:
    fresh(RAN + """
import opjit
from opjit import catalog, resources
ops = opjit.add_path(resources.folder("kernels_c") / "lltm")
assert ran() == ["lltm"]
assert [op.schema.name for op in ops] == ["lltm_backward", "lltm_forward"]
assert all(op is catalog.find(op.qualified) and op.handle is not None for op in ops)
assert sys.modules["opjit_bundled_lltm"].lltm_forward is catalog.find("lltm_forward")
""", tmp_path)


def test_a_module_of_the_user_s_keeps_its_name_beside_a_bundled_folder_of_the_same_name(tmp_path: Path) -> None:
    folder = helpers.write_op(tmp_path / "round_ste")
    fresh(f"""
import sys
import torch, opjit
opjit.add_path({os.fspath(folder)!r})
torch.ops.opjit.round_ste
assert sys.modules["opjit_ops_round_ste"].plus is opjit.catalog.find("keytest::plus")
""", tmp_path)


def test_completion_offers_all_bundled_ops(tmp_path: Path) -> None:
    fresh(f"""
import torch, opjit
assert set({[name.removeprefix("opjit::") for name in BUNDLED]!r}) <= set(dir(torch.ops.opjit))
""", tmp_path)


def test_importing_opjit_again_leaves_its_ops_as_they_are(tmp_path: Path) -> None:
    fresh("""
import importlib
import torch, opjit
used = opjit.catalog.find("allreduce")
handle = used.handle
importlib.reload(opjit)
assert len(opjit.catalog.all_ops()) > 5
assert used is opjit.catalog.find("allreduce") and used.handle is handle
assert opjit.get("allreduce", "cpu")(torch.ones(3)).item() == 3
""", tmp_path)


def test_an_interrupt_while_torch_is_told_of_an_op_leaves_its_name_free(tmp_path: Path) -> None:
    fresh("""
import torch, opjit
register, kept = torch.library.register_fake, []

def interrupted(*args, **kwargs):
    torch.library.register_fake = register
    raise KeyboardInterrupt

torch.library.register_fake = interrupted
try:
    torch.ops.opjit.allreduce
except KeyboardInterrupt as error:
    kept.append(error)  # as an interactive Python keeps the last one, with its traceback
assert torch.ops.opjit.allreduce(torch.ones(3)).item() == 3
""", tmp_path)


def test_an_op_py_that_was_interrupted_runs_again(tmp_path: Path) -> None:
    fresh("""
import torch, opjit
from opjit import catalog
run, calls = catalog.declare_folder, []

def interrupted(folder, name):
    calls.append(folder.name)
    if len(calls) == 1:
        raise KeyboardInterrupt
    run(folder, name)

catalog.declare_folder = interrupted
try:
    torch.ops.opjit.allreduce
except KeyboardInterrupt:
    pass
assert torch.ops.opjit.allreduce(torch.ones(3)).item() == 3
assert calls == ["allreduce"] * 2
""", tmp_path)


def test_a_declaration_of_a_bundled_op_s_name_is_refused_before_anybody_named_that(tmp_path: Path) -> None:
    said = fresh("""
import torch, opjit
try:
    opjit.inline("opjit::round_ste(Tensor x) -> Tensor", like="x", c="opjit_status round_ste_cpu(void);")
except opjit.errors.DeclarationError as error:
    print(error)
""", tmp_path)
    assert re.search(r"two ops are named opjit::round_ste: .*kernels_c/round_ste, the other in inline code", said), said


def test_an_exported_program_runs_where_only_opjit_was_imported(tmp_path: Path) -> None:
    program = tmp_path / "program.pt2"
    fresh(f"""
import torch, opjit

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.ops.opjit.round_ste(x) + torch.ops.opjit.allreduce(x)

torch.export.save(torch.export.export(Model(), (torch.rand(3, 4),)), {os.fspath(program)!r})
""", tmp_path)
    fresh(f"""
import torch, opjit
x = torch.rand(3, 4)
torch.testing.assert_close(torch.export.load({os.fspath(program)!r}).module()(x), (x > 0.5).float() + x.sum())
""", tmp_path)
