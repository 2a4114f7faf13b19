"""opjit_printf: a kernel's text stands in order between the lines that Python prints, wherever those go."""

import subprocess
import sys
import threading
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

import opjit
from tests import helpers
from tests.helpers import MakeOp, fresh, python_on_terminal

EXAMPLE = helpers.ROOT / "examples" / "tensor_negate"
SAY = """
#include "opjit_printf.h"
opjit_status say_cpu(const opjit_tensor *x, int64_t n)
{
    (void)x;
    opjit_printf("C %lld\\n", (long long)n);
    return OPJIT_OK;
}
"""
PARTS = """
#include "opjit_printf.h"
static opjit_status part(int64_t begin, int64_t end, void *context)
{
    (void)context;
    for (int64_t i = begin; i < end; i++)
        opjit_printf("part %lld\\n", (long long)i);
    return OPJIT_OK;
}
opjit_status parts_cpu(const opjit_tensor *x)
{
    return opjit_parallel_for(0, x->numel, 1, part, NULL);
}
"""
# Between lines of Python's, whole and unfinished.
CONVERSATION = "x = torch.ones(1)\nfor i in range(3):\n    print('Python', i, end=' ' if i else None)\n    torch.ops.printtest.say(x, i)\n"
HEARD = "Python 0\nC 0\nPython 1 C 1\nPython 2 C 2\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of an op that prints its number."""
    return helpers.write_op(
        tmp_path / "say",
        op_py=helpers.op_py("printtest::say(Tensor x, int n) -> ()"),
        say_c='#include "opjit.h"\n#include <stdio.h>\n' + SAY,
    )


@pytest.fixture
def say(make_op: MakeOp) -> opjit.Op:
    op = make_op("say(Tensor x, int n) -> ()", SAY, fake=lambda x, n: None)
    opjit.get(op.qualified, "cpu")
    return op


def test_in_a_pipe_the_lines_are_in_order_and_out_before_anything_else_happens(
    folder: Path,
) -> None:
    """The process goes without flushing anything, as in a crash."""
    assert (
        fresh(
            helpers.declare(folder) + CONVERSATION + "import os\nos._exit(0)",
            {"PYTHONUNBUFFERED": None},
        ).stdout
        == HEARD
    )


def test_in_a_terminal_the_lines_are_in_order(folder: Path) -> None:
    # A build that takes long shows itself.
    code = helpers.declare(folder) + "opjit.get('printtest::say', 'cpu')\n" + CONVERSATION
    status, heard = python_on_terminal("-c", code, OPJIT_VERBOSE="0")
    assert status == 0, heard
    # Before it, what a build shows at a terminal.
    assert heard.replace("\r\n", "\n").endswith(HEARD), heard


@pytest.mark.slow
def test_in_a_notebook_the_lines_are_in_their_cell_in_order(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    code = f"""
import nbclient, nbformat
cells = [{helpers.declare(folder)!r}, *[{CONVERSATION!r}] * 20]
book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
nbclient.NotebookClient(book, kernel_name="python3", coalesce_streams=True).execute()
for cell in book.cells[1:]:
    assert [(output.name, output.text) for output in cell.outputs] == [("stdout", {HEARD!r})], cell.outputs
kept, run = (nbformat.read({str(EXAMPLE / "tensor_negate.ipynb")!r}, as_version=4) for _ in range(2))
nbclient.NotebookClient(run, kernel_name="python3", coalesce_streams=True, resources={{"metadata": {{"path": {str(EXAMPLE)!r}}}}}).execute()
outputs = [[cell.get("outputs") for cell in book.cells] for book in (kept, run)]
assert outputs[0] == outputs[1], outputs
assert "elements 5000 to 9999, first 9666" in str(outputs)
print("passed")
"""
    changes: dict[str, str | None] = {
        name: str(tmp_path / name)
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")
    }
    assert fresh(code, {**changes, "PYTHONDONTWRITEBYTECODE": "1"}).stdout.endswith("passed\n")


def test_the_lines_follow_sys_stdout(
    say: opjit.Op, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say(torch.ones(1), 1)
    with redirect_stdout(StringIO()) as text:
        say(torch.ones(1), 2)
    monkeypatch.setattr(sys, "stdout", None)
    say(torch.ones(1), 3)  # a process without a standard output
    monkeypatch.undo()
    assert (capsys.readouterr().out, text.getvalue()) == ("C 1\n", "C 2\n")


def test_a_standard_output_that_takes_nothing_does_not_stop_the_op(say: opjit.Op) -> None:
    class Closed(StringIO):
        def write(self, text: str) -> int:
            raise OSError("closed")

    with redirect_stdout(Closed()):
        say(torch.ones(1), 1)
    assert sys.exc_info() == (None, None, None)


def test_any_text_of_any_length_arrives(make_op: MakeOp, capfd: pytest.CaptureFixture[str]) -> None:
    op = make_op(
        "say(Tensor x, str text, int wide) -> ()",
        '#include "opjit_printf.h"\n\nopjit_status say_cpu(const opjit_tensor *x, const char *text, int64_t wide)\n'
        '{ (void)x; opjit_printf("%s%*d %% \\xff\\n", text, (int)wide, 1); return OPJIT_OK; }',
        fake=lambda x, text, wide: None,
    )
    for text, wide in (("", 1), ("smörgås %d %n 日本", 7), ("x" * 100_000, 100_000)):
        op(torch.ones(1), text, wide)
        assert capfd.readouterr().out == f"{text}{1:{wide}d} % \ufffd\n"


def test_other_threads_write_to_the_file_descriptor(
    make_op: MakeOp, say: opjit.Op, capfd: pytest.CaptureFixture[str]
) -> None:
    """They must not wait for Python's lock: the caller may hold it while it waits for them."""
    make_op("parts(Tensor x) -> ()", PARTS, fake=lambda x: None)(torch.ones(40))
    assert sorted(capfd.readouterr().out.splitlines()) == sorted(f"part {i}" for i in range(40))
    thread = threading.Thread(target=say, args=(torch.ones(1), 7))
    with redirect_stdout(StringIO()) as text:
        thread.start()
        thread.join()
    assert (capfd.readouterr().out, text.getvalue()) == ("C 7\n", "")


def test_a_caller_that_holds_python_s_lock_is_not_waited_for(tmp_path: Path) -> None:
    """A call through ctypes.PyDLL keeps the lock, as a C++ program around Python may; the first part, its own, does not print."""
    (tmp_path / "op.py").write_text(helpers.op_py("printtest::parts(Tensor x) -> ()"))
    (tmp_path / "parts.c").write_text(
        '#include "opjit.h"\n'
        + PARTS.replace("int64_t i = begin", "int64_t i = begin ? begin : end")
    )
    code = (
        helpers.declare(tmp_path)
        + """
import ctypes
opjit.get("printtest::parts", "cpu")
torch.set_num_threads(4)
shim = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
numel, stride, tensor = ctypes.c_int64(40), ctypes.c_int64(1), ctypes.c_uint64()
made = shim.aoti_torch_empty_strided(ctypes.c_int64(1), ctypes.byref(numel), ctypes.byref(stride), shim.aoti_torch_dtype_float32(), 0, 0,
                                     ctypes.byref(tensor))
assert made == 0
ctypes.PyDLL(registry.find("printtest::parts").loaded["cpu"].registered._name).opjit_kernel(ctypes.byref(tensor), 1, 0)
"""
    )
    assert sorted(fresh(code).stdout.splitlines()) == sorted(f"part {i}" for i in range(10, 40))


def test_a_gpu_s_lines_are_shown_after_a_synchronisation(
    make_op: MakeOp, cuda_device: str, capfd: pytest.CaptureFixture[str]
) -> None:
    op = make_op(
        "say(Tensor x, int n) -> ()",
        fake=lambda x, n: None,
        cuda="""
        #include "opjit_printf.h"
        static __global__ void say_kernel(const float *x, int n) { printf("device %d %g\\n", n, x[0]); }
        opjit_status say_cuda(const opjit_tensor *x, int64_t n, cudaStream_t stream)
        {
            say_kernel<<<1, 1, 0, stream>>>((const float *)x->data, (int)n);
            OPJIT_TRY(OPJIT_LAUNCHED());
            OPJIT_CUDA_CHECK(cudaStreamSynchronize(stream));
            opjit_printf("host %d\\n", (int)n);
            return OPJIT_OK;
        }
        """,
    )
    for n in range(3):
        op(torch.full((1,), 2.5, device=cuda_device), n)
    assert capfd.readouterr().out == "".join(f"device {n} 2.5\nhost {n}\n" for n in range(3))


def test_a_library_in_a_process_without_python_writes_to_the_file_descriptor(
    tmp_path: Path,
) -> None:
    """The functions of Python's that opjit_printf calls are weak: they may be missing."""
    kernels_c = helpers.ROOT / "kernels_c"
    (tmp_path / "main.c").write_text("""
        #include "opjit_printf.h"
        int main(void) { opjit_printf("C %d\\n", 1); return 0; }
        """)
    command = [helpers.real_compiler(), "-std=gnu11", f"-I{kernels_c}", "main.c", "-o", "main"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert (
        subprocess.run([tmp_path / "main"], check=True, capture_output=True, text=True).stdout
        == "C 1\n"
    )
