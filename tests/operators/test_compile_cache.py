"""torch.compile keeps graphs on disk and in memory: a graph is not used again once an op in it is declared differently."""

from pathlib import Path
from typing import Any

import pytest
import torch

import opjit
from tests.helpers import fresh

pytestmark = pytest.mark.torch
IMPORTS = "import torch, opjit\n"
# Reports the results of a compiled call, and how often torch found its graph on disk: in AOTAutograd's cache, and in Inductor's.
CALL = """
from torch._dynamo.utils import counters
x = torch.ones(3)
compiled = torch.compile(lambda x: op(x), fullgraph=True)
print(compiled(x).tolist())
"""
HITS = """
print(counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"])
"""
FAKE = "lambda x: x.new_empty(x.numel() * 2)"


def grow(times: int, fake: str = FAKE, more: str = "") -> str:
    """An op whose result is `times` as long as its argument."""
    return f'''
op = opjit.inline("grow(Tensor x) -> Tensor", fake={fake}{more}, c="""
opjit_status grow_cpu(const opjit_tensor *x, opjit_tensor *out)
{{
    OPJIT_TRY(opjit_empty(out, OPJIT_SIZES(x->numel * {times}), x->dtype, x));
    for (int64_t i = 0; i < out->numel; i++)
        ((float *)out->data)[i] = {times};
    return OPJIT_OK;
}}""")
'''


def run(cache: Path, *texts: str, **changes: str) -> list[str]:
    """The lines that a process of its own prints."""
    text = "".join((IMPORTS, *texts, HITS))
    return fresh(text, {"TORCHINDUCTOR_CACHE_DIR": str(cache), **changes}).stdout.splitlines()


def test_a_graph_is_found_while_its_declarations_are_the_same(tmp_path: Path) -> None:
    assert run(tmp_path, grow(2), CALL)[-1] == "0 0"
    assert run(tmp_path, grow(2), CALL) == [str([2.0] * 6), "1 1"]


def test_a_graph_is_stale_when_a_fake_kernel_gives_another_size(tmp_path: Path) -> None:
    run(tmp_path, grow(2), CALL)
    assert run(tmp_path, grow(3, FAKE.replace("2", "3")), CALL) == [str([3.0] * 9), "0 0"]


WRITES = '''
op = opjit.inline("grow(Tensor{alias} x, Tensor y) -> ()", fake=lambda x, y: None, c="""
opjit_status grow_cpu({const}opjit_tensor *x, const opjit_tensor *y)
{{
    ((float *)x->data)[0] += 5;
    return OPJIT_OK;
}}""")
'''
WRITE_CALL = """
from torch._dynamo.utils import counters
compiled = torch.compile(lambda x: (op(x, x + 1), x * 2)[1], fullgraph=True)
print(compiled(torch.ones(2)).tolist())
"""


def test_a_graph_is_stale_when_a_schema_writes_another_argument(tmp_path: Path) -> None:
    run(tmp_path, WRITES.format(alias="", const="const "), WRITE_CALL)
    assert run(tmp_path, WRITES.format(alias="(a!)", const=""), WRITE_CALL)[0] == str([12.0, 2.0])


BACKWARD = """
@op.setup_context
def setup_context(ctx, inputs, output):
    ctx.size = inputs[0].shape

@op.backward
def backward(ctx, grad):
    return grad.new_full(ctx.size, {slope})
"""
GRADIENT = """
from torch._dynamo.utils import counters
x = torch.ones(3, requires_grad=True)
torch.compile(lambda x: op(x), fullgraph=True)(x).sum().backward()
print(x.grad.tolist())
"""


def test_a_graph_is_stale_when_a_backward_differs(tmp_path: Path) -> None:
    assert run(tmp_path, grow(2), BACKWARD.format(slope=7), GRADIENT)[0] == str([7.0] * 3)
    assert run(tmp_path, grow(2), BACKWARD.format(slope=8), GRADIENT)[0] == str([8.0] * 3)


TIMES = """
import functools
class times:
    def __init__(self, function, by):
        self.function, self.by = function, by
        functools.update_wrapper(self, function)
    def __call__(self, ctx, grad):
        return self.function(ctx, grad) * self.by
def plain(ctx, grad):
    return grad.new_full(ctx.size, 1)
op.setup_context(lambda ctx, inputs, output: setattr(ctx, "size", inputs[0].shape))
op.backward(times(plain, {slope}))
"""


def test_a_graph_is_not_used_again_when_an_object_is_part_of_a_backward(tmp_path: Path) -> None:
    for slope, hits in ((1, "0 0"), (2, "0 0"), (2, "0 0")):
        lines = run(tmp_path, grow(2), TIMES.format(slope=slope), GRADIENT)
        assert lines == [str([float(slope)] * 3), hits]


def test_a_graph_is_not_used_again_when_a_backward_reads_a_variable_of_the_process(
    tmp_path: Path,
) -> None:
    backward = BACKWARD.format(slope='float(os.environ["SLOPE"])')
    for slope in ("1.0", "2.0"):
        found = run(tmp_path, "import os\n", grow(2), backward, GRADIENT, SLOPE=slope)
        assert found == [str([float(slope)] * 3), "0 0"]
    again = f"os.environ['SLOPE'] = '3.0'\ntorch._dynamo.reset()\n{GRADIENT}"
    found = run(tmp_path, "import os\n", grow(2), backward, GRADIENT, again, SLOPE="1.0")
    assert found[:2] == [str([1.0] * 3), str([3.0] * 3)]


def test_a_graph_is_used_again_when_a_backward_calls_a_plain_function(tmp_path: Path) -> None:
    helper = "def scaled(grad, size): return grad.new_full(size, 7)\n"
    backward = BACKWARD.replace("grad.new_full(ctx.size, {slope})", "scaled(grad, ctx.size)")
    assert run(tmp_path, helper, grow(2), backward, GRADIENT)[-1] == "0 0"
    assert run(tmp_path, helper, grow(2), backward, GRADIENT) == [str([7.0] * 3), "1 2"]


BUNDLED = """
from torch._dynamo.utils import counters
import os
op = torch.ops.opjit.round_ste
if os.environ["SLOPE"] != "1.0":
    opjit.registry.find("round_ste").backward(lambda ctx, grad: grad * 2)
"""


def test_a_graph_with_a_bundled_op_is_stale_when_its_declaration_differs(tmp_path: Path) -> None:
    for slope, hits in (("1.0", "0 0"), ("1.0", "0 1"), ("2.0", "0 0")):
        found = run(tmp_path, BUNDLED, GRADIENT, SLOPE=slope)
        assert found == [str([float(slope)] * 3), hits]


HELPER = "class Rule:\n    times = {times}\ndef size(x):\n    return x.numel() * Rule.times\n"
BY_HELPER = "lambda x: x.new_empty(size(x))"


def test_a_graph_is_stale_when_a_value_that_its_fake_kernel_reads_differs(tmp_path: Path) -> None:
    run(tmp_path, HELPER.format(times=2), grow(2, BY_HELPER), CALL)
    assert run(tmp_path, HELPER.format(times=3), grow(3, BY_HELPER), CALL)[0] == str([3.0] * 9)


OP_PY = """
import torch, opjit
@opjit.op("cachetest::same(Tensor x) -> Tensor"{tags})
def same(x):
    return torch.empty_like(x)
"""
C = """#include "opjit.h"
opjit_status same_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[i] = VALUE;
    return OPJIT_OK;
}
"""


def test_a_graph_is_stale_when_tags_differ_and_not_when_a_kernel_does(tmp_path: Path) -> None:
    folder = tmp_path / "same"
    folder.mkdir()
    use = f"[op] = opjit.add_path({str(folder)!r})"
    for value, tags, hits in (
        ("1", "", "0 0"),
        ("2", "", "1 1"),
        ("2", ", tags=[torch.Tag.needs_exact_strides]", "0 0"),
    ):
        (folder / "op.py").write_text(OP_PY.format(tags=tags))
        (folder / "same.c").write_text(C.replace("VALUE", value))
        assert run(tmp_path / "graphs", use, CALL) == [str([float(value)] * 3), hits]


def test_a_users_tag_stays_part_of_the_key_whenever_and_wherever_it_is_set(tmp_path: Path) -> None:
    set_tag = "torch.compiler.config.cache_key_tag = 'mine'\n"
    in_thread = """
import threading
def show():
    print(torch.compiler.config.cache_key_tag)
for thread in (threading.Thread(target=show),):
    thread.start()
    thread.join()
with torch.compiler.config.patch(cache_key_tag="theirs"):
    show()
show()
"""
    counters = "from torch._dynamo.utils import counters\n"
    for text in (set_tag + grow(2), grow(2) + set_tag):
        other, patched, own, _ = run(tmp_path, text, in_thread, counters)
        mark = patched.removeprefix("theirs")
        assert mark.startswith(" opjit:")
        assert own == f"mine{mark}"
        assert other == mark  # torch keeps the user's tag for one thread
    shown = run(tmp_path, "print([torch.compiler.config.cache_key_tag])\n", counters)[0]
    assert shown == "['']"


def redeclared(times: int, fake: str = FAKE) -> opjit.Op:
    names = {"opjit": opjit, "__name__": "redeclared_cells"}
    exec(grow(times, fake), names)
    op = names["op"]
    assert isinstance(op, opjit.Op)
    return op


def test_a_compiled_function_compiles_again_after_another_fake_kernel_and_only_then() -> None:
    call = redeclared(2).overload
    compiles = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiles.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(lambda x: call(x) + 1, backend=count)
    x = torch.ones(3)
    assert compiled(x).tolist() == [3.0] * 6
    redeclared(2)
    assert compiled(x).tolist() == [3.0] * 6
    assert len(compiles) == 1
    redeclared(3, FAKE.replace("2", "3"))
    assert compiled(x).tolist() == [4.0] * 9
    assert len(compiles) == 2


def test_a_compiled_function_compiles_again_after_another_backward() -> None:
    def gradient() -> float:
        x = torch.ones(3, requires_grad=True)
        compiled(x).sum().backward()
        assert x.grad is not None
        return float(x.grad[0])

    def declare(slope: int) -> opjit.Op:
        op = redeclared(2)
        op.setup_context(lambda ctx, inputs, output: None)
        op.backward(lambda ctx, grad: grad[:3] * slope)
        return op

    call = declare(7).overload
    compiled = torch.compile(lambda x: call(x), fullgraph=True, backend="aot_eager")
    assert gradient() == 7.0
    declare(8)
    assert gradient() == 8.0


def test_a_compiled_function_compiles_again_after_a_value_that_is_read_changed() -> None:
    values = {"opjit": opjit, "__name__": "redeclared_cells", "times": 2}
    fake = "lambda x: x.new_empty(x.numel() * times)"
    exec(grow(2, fake), values)
    op: object = values["op"]
    assert isinstance(op, opjit.Op)
    call = op.overload
    compiled = torch.compile(lambda x: call(x), fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(1)).tolist() == [2.0] * 2
    values["times"] = 3
    exec(grow(3, fake), values)
    assert compiled(torch.ones(1)).tolist() == [3.0] * 3


def test_a_reload_compiles_again_after_another_declaration_and_not_after_another_kernel(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "same"
    folder.mkdir()

    def write(value: str, tags: str = "", more: str = "") -> None:
        text = OP_PY.replace("cachetest", "reloadedtest").format(tags=tags)
        (folder / "op.py").write_text(text + more)
        (folder / "same.c").write_text(C.replace("VALUE", value))

    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    write("1")
    opjit.add_path(folder)
    compiled = torch.compile(
        lambda x: torch.ops.reloadedtest.same(x), backend=count, fullgraph=True
    )
    assert compiled(torch.ones(1)).item() == 1
    tags = ", tags=[torch.Tag.needs_exact_strides]"
    backward = "@same.backward\ndef backward(ctx, grad):\n    return grad\n"
    for value, declared, more, compiles in (
        ("2", "", "", 1),
        ("3", "", "# a comment\n", 1),
        ("4", tags, "", 2),
        ("5", tags, backward, 3),
        ("6", tags, backward, 3),
    ):
        write(value, declared, more)
        opjit.reload("reloadedtest::same", "cpu")
        assert compiled(torch.ones(1)).item() == float(value)
        assert len(graphs) == compiles, value
