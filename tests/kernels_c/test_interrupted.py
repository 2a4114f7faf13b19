"""opjit_interrupted(): a real Ctrl-C in a real process ends a kernel's loop, in any thread, and Python raises what its handler raises."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.helpers import environment, op_py

LOOP = """
#include <unistd.h>
#include "opjit.h"
static opjit_status loop(int64_t begin, int64_t end, void *x)
{
    for (int64_t step = 0; step < 120000; step++) {
        if (opjit_interrupted(x))
            return OPJIT_OK;
        if (step == 0 && begin == 0)
            OPJIT_CHECK(write(1, "looping\\n", 8) == 8, "no stdout");
        usleep(1000);
    }
    OPJIT_FAIL("no interrupt from %lld to %lld", (long long)begin, (long long)end);
}
opjit_status {name}_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    OPJIT_TRY({call});
    return OPJIT_OK;
}
"""
AT_ONCE = "loop(0, 1, (void *)x)"
IN_THE_POOL = "opjit_parallel_for(0, 4, 1, loop, (void *)x)"
REPORTED = """
try:
    {call}
    print("returned")
except BaseException as error:
    print(type(error).__name__, error)
"""
IN_A_THREAD = """
done = threading.Event()  # an interrupted Thread.join() of Python 3.11 takes the thread for one that has ended
def work():
    try:
        ops[0](x)
        print("returned")
    except RuntimeError as error:
        print(str(error).splitlines()[0])
    done.set()
try:
    threading.Thread(target=work).start()
    done.wait()
except KeyboardInterrupt:
    print("main interrupted")
    done.wait()
"""


def _interrupted(folder: Path, code: str, *, call: str = AT_ONCE, times: int = 1) -> list[str]:
    """The lines that a process prints after it is interrupted at each "looping"."""
    declarations = []
    for name in ("first", "second"):
        (folder / name).mkdir()
        (folder / name / f"{name}.c").write_text(
            LOOP.replace("{name}", name).replace("{call}", call)
        )
        (folder / name / "op.py").write_text(op_py(f"interrupted::{name}(Tensor x) -> Tensor"))
        declarations.append(f"opjit.add_path({str(folder / name)!r})[0]")
    program = (
        "import signal, threading, torch, opjit\nx = torch.ones(4)\n"
        f"ops = [{', '.join(declarations)}]\nfor op in ops:\n    opjit.get(op.qualified, 'cpu')\n"
        + textwrap.dedent(code)
    )
    lines = []
    with subprocess.Popen(
        [sys.executable, "-u", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment({"OMP_NUM_THREADS": "2"}),
    ) as started:
        assert started.stdout is not None
        for line in started.stdout:
            if line == "looping\n":
                started.send_signal(signal.SIGINT)
                times -= 1
            else:
                lines.append(line.rstrip())
    assert started.returncode == 0, lines
    assert times == 0, lines
    return lines


@pytest.mark.parametrize("call", [AT_ONCE, IN_THE_POOL], ids=["main-thread", "thread-pool"])
def test_python_raises_keyboard_interrupt_once(tmp_path: Path, call: str) -> None:
    code = REPORTED.format(call="ops[0](x)") + "print(sum(range(10)))\n"
    assert _interrupted(tmp_path, code, call=call) == ["KeyboardInterrupt", "45"]


def test_each_call_of_each_op_is_interrupted_anew_and_a_program_may_set_its_handler_between_them(
    tmp_path: Path,
) -> None:
    code = (
        REPORTED.format(call="ops[0](x)")
        + """
class Stop(Exception): pass
def stop(number, frame): raise Stop("now")
signal.signal(signal.SIGINT, stop)
"""
        + "".join(REPORTED.format(call=f"ops[{i}](x)") for i in (0, 1, 0))
    )
    assert _interrupted(tmp_path, code, times=4) == ["KeyboardInterrupt", *["Stop now"] * 3]


def test_results_that_are_not_whole_are_an_error_where_python_raises_nothing(
    tmp_path: Path,
) -> None:
    code = "signal.signal(signal.SIGINT, lambda number, frame: print('noted'))\n" + REPORTED.format(
        call="ops[0](x)"
    )
    assert _interrupted(tmp_path, code) == [
        "noted",
        "RuntimeError interrupted::first: interrupted by Ctrl-C",
    ]


def test_a_kernel_in_another_thread_ends_too(tmp_path: Path) -> None:
    lines = _interrupted(tmp_path, IN_A_THREAD)
    assert sorted(lines) == ["interrupted::first: interrupted by Ctrl-C", "main interrupted"]


def test_an_interrupt_before_a_call_is_not_that_call_s(tmp_path: Path) -> None:
    """Python raised it long ago."""
    code = (
        REPORTED.format(call="ops[0](x)")
        + """
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    pass
"""
        + REPORTED.format(call="ops[1](x)")
    )
    assert _interrupted(tmp_path, code, times=2) == ["KeyboardInterrupt"] * 2
