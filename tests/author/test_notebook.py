"""The cell magic, on a real Jupyter kernel, and what its line may hold."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

from opjit.author import notebook  # noqa: E402
from opjit.recipe import toolchain  # noqa: E402

SETUP = "import torch\n%load_ext opjit\nx = torch.ones(3)\nimport warnings; warnings.simplefilter('error')"
CELL = """%%opjit scale(Tensor x, float a) -> Tensor --like x OPTIONS
#include "opjit_printf.h"

opjit_status scale_cpu(const opjit_tensor *x, double a, opjit_tensor *out)
{
    OPJIT_CHECK(a > 0, "a is positive");
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    opjit_printf("in C\\n");
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[i] = (float)a * ((const float *)x->data)[i] + CONSTANT;
    return OPJIT_OK;
}
"""


class Kernel:
    """A Jupyter kernel that runs cells."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def run(self, text: str) -> list[Any]:
        """A cell's outputs."""
        cell = nbformat.v4.new_code_cell(text)
        self._client.nb.cells.append(cell)
        outputs: list[Any] = self._client.execute_cell(cell, len(self._client.nb.cells) - 1).outputs
        return outputs

    def printed(self, text: str) -> str:
        """What a cell without an error shows."""
        outputs = self.run(text)
        assert [output.get("evalue") for output in outputs if output.output_type == "error"] == []
        return "".join(
            output.text if output.output_type == "stream" else output.data["text/plain"] + "\n"
            for output in outputs
        )


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with (
        pytest.MonkeyPatch.context() as patch,
        started(tmp_path_factory.mktemp("jupyter"), patch) as client,
    ):
        made = Kernel(client)
        made.printed(SETUP)
        yield made


@contextmanager
def started(folder: Path, patch: pytest.MonkeyPatch, book: Any = None) -> Iterator[Any]:
    """A client whose kernel leaves nothing in the user's folders."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        patch.setenv(name, str(folder / name))
    patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    book = book or nbformat.v4.new_notebook()
    client = nbclient.NotebookClient(
        book, kernel_name="python3", coalesce_streams=True, allow_errors=True
    )
    with client.setup_kernel():
        yield client


def edited(constant: str, options: str = "") -> str:
    return CELL.replace("CONSTANT", constant).replace(" OPTIONS", options)


@pytest.mark.slow
def test_a_cell_is_an_op_and_an_edit_of_it_is_called_at_once_by_all_who_hold_it(
    kernel: Kernel,
) -> None:
    assert kernel.printed(edited("0")).startswith("inline::scale for cpu: ready in ")
    assert (
        kernel.printed("held = scale.overload\nprint('before')\nprint(scale(x, 2.0).tolist())")
        == "before\nin C\n[2.0, 2.0, 2.0]\n"
    )
    for constant in ("1", "2", "0"):
        assert "ready in" in kernel.printed(edited(constant))
        expected = f"in C\n{[2.0 + float(constant)] * 3}\n"
        for called in ("scale", "held", "torch.ops.inline.scale"):
            assert kernel.printed(f"print({called}(x, 2.0).tolist())") == expected
    assert kernel.printed(
        "torch.compile(lambda x: scale(x, 3.0), fullgraph=True, backend='aot_eager')(x)[0].item()"
    ).endswith("3.0\n")


def test_wrong_code_shows_the_compiler_s_first_error_at_the_cell_s_line_and_the_version_before_works(
    kernel: Kernel,
) -> None:
    kernel.printed(edited("5"))
    for text, expected in (
        (edited("oops"), "cell:10:76: error: 'oops' undeclared"),
        (
            edited("5").replace("scale_cpu", "scal_cpu"),
            "cell: error: it does not define scale_cpu, which inline::scale calls: expected opjit_status scale_cpu(",
        ),
    ):
        state, error = kernel.run(text)
        assert (
            state.data["text/plain"]
            == "inline::scale: not built; the previous version stays in use"
        )
        assert (error.output_type, error.ename) == ("error", "CompileError")
        assert error.evalue.startswith(expected)
        assert error.traceback[0] == f"CompileError: {error.evalue}"
        assert "opjit-inline-" not in error.evalue
        assert kernel.printed("print(scale(x, 1.0).tolist())") == "in C\n[6.0, 6.0, 6.0]\n"
    [error] = kernel.run("scale(x, -1.0)")[-1:]
    assert "a is positive [scale.c:6]" in error.evalue  # the cell's line, too


def test_a_cell_that_never_compiled_declares_nothing(kernel: Kernel) -> None:
    state, error = kernel.run("%%opjit fresh(Tensor x) -> Tensor --like x\nnonsense")
    assert state.data["text/plain"] == "inline::fresh: not built"
    assert error.evalue.startswith("cell:2:")
    assert (
        kernel.printed("print('fresh' in globals(), hasattr(torch.ops.inline, 'fresh'))")
        == "False False\n"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "Missing argument 'SCHEMA...'"),
        (
            "scale(Tensor x) -> Tensor --zip",
            "unknown option --zip; run %%opjit? to list the options",
        ),
        ("scale(Tensor x) -> Tensor --like", "Option '--like' requires an argument."),
        ("scale(Tensor x) -> Tensor --cuda=1", "Option '--cuda' does not take a value."),
        (
            "scale(Tensor x) -> Tensor --fake nobody",
            "--fake names 'nobody', which is not a function in this notebook",
        ),
        ("scale(Tensor x) -> Tensor --bench 'x", "a quotation mark is not closed"),
        (
            "scale(Tensor x) -> Tensor --over n=3",
            "--over is about --bench, which the line does not have",
        ),
        (
            'scale(Tensor x) -> Tensor --test "x"',
            "--test compares with a reference: --reference NAME",
        ),
        ("scale(Tensr x) -> Tensor", "~~~~~ <--- HERE"),
        ("scale(Tensor x) -> Tensor --like y", "expected the name of a Tensor argument"),
    ],
)
def test_a_line_that_cannot_be_read_is_answered_in_a_sentence(
    kernel: Kernel, line: str, message: str
) -> None:
    outputs = kernel.run(f"%%opjit {line}\nnonsense")
    text = "".join(
        output.get("text", "") + "".join(output.get("traceback", [])) for output in outputs
    )
    assert message in text
    assert "Traceback" not in text
    assert len(text.splitlines()) < 6


@pytest.mark.nvcc
def test_a_cell_of_cuda_compiles_for_an_arch_without_a_gpu(kernel: Kernel) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    good = (
        "opjit_status far_cuda(const opjit_tensor *x, opjit_tensor *out, cudaStream_t stream)\n"
        "{ return opjit_empty_like(out, x, x->dtype); }"
    )
    line = "%%opjit far(Tensor x) -> Tensor --like x --cuda --arch sm_90\n"
    [refusal] = kernel.run(line.replace(" --arch sm_90", "") + good)
    assert "there is no device for this cell: " in refusal.text
    assert refusal.text.strip().endswith(
        "; --arch sm_90 only compiles it; without --cuda a cell is C, for the CPU"
    )
    assert "opjit get" not in refusal.text, "no command can see a cell"
    printed = kernel.printed(line + good)
    assert "inline::far for cuda sm_90" in printed
    assert printed.strip().endswith("; no GPU here runs it")
    [error] = kernel.run(line + good.replace("return", "retrun"))
    assert "cell" in "".join(error.traceback)
    assert "retrun" in "".join(error.traceback)


QUIET = (
    CELL.replace("CONSTANT", "1")
    .replace('    opjit_printf("in C\\n");\n', "")
    .replace('a > 0, "a is positive"', 'x->dtype == OPJIT_FLOAT32 && x->contiguous, "float32"')
)


def test_bench_shows_a_table_of_a_call_and_a_reference(kernel: Kernel) -> None:
    text = QUIET.replace("OPTIONS", '--bench "x, a=2.0" OPTIONS')
    alone = kernel.printed(text.replace(" OPTIONS", "")).splitlines()
    assert alone[1].split() == ["arguments", "scale", "GB/s"]
    assert re.fullmatch(r" x, a=2.0 +[\d.]+ us +[\d.]+ ", alone[3])
    kernel.printed("def plain(x, a): return a * x + 1")
    lines = kernel.printed(text.replace("OPTIONS", "--reference plain")).splitlines()
    assert lines[1].split() == ["arguments", "scale", "GB/s", "plain", "GB/s", "ratio"]
    seconds, rate, its_seconds, _, ratio = map(
        float, re.findall(r"[\d.]+(?= )", lines[3].replace("x, a=2.0", ""))
    )
    assert ratio == pytest.approx(seconds / its_seconds, rel=0.02, abs=0.01)
    assert rate == pytest.approx(24 / seconds / 1e3, abs=0.06)
    kernel.printed("def wrong(x, a): return a * x")
    assert (
        "Tensor-likes are not close"
        in kernel.run(text.replace("OPTIONS", "--reference wrong"))[-1].evalue
    )
    assert (
        "not a function in this notebook"
        in kernel.run(text.replace("OPTIONS", "--reference nothing"))[-1].text
    )


def test_bench_measures_over_sizes(kernel: Kernel) -> None:
    kernel.printed("def plain(x, a): return a * x + 1")
    line = '--bench "torch.ones(n), 2.0" --over "n=2**4, 1000, 2**20" --reference plain'
    lines = kernel.printed(QUIET.replace("OPTIONS", line)).splitlines()
    assert [line.split()[0] for line in lines if " us " in line or " ms " in line] == [
        "16",
        "1,000",
        "1,048,576",
    ]


@pytest.mark.slow
def test_test_runs_the_checks_on_the_cell(kernel: Kernel) -> None:
    kernel.printed("def plain(x, a): return a * x + 1")
    told = re.sub(
        r"\x1b\[\d*m",
        "",
        kernel.printed(QUIET.replace("OPTIONS", '--test "x, a=2.0" --reference plain')),
    )
    assert "inline::scale on cpu\n" in told
    assert re.search(
        r"^  ok +results +every sample; 1 call of up to 3 elements$", told, re.MULTILINE
    )
    assert re.search(r"^\d+ ok, \d+ skipped$", told.splitlines()[-1])
    dies = QUIET.replace("return OPJIT_OK", "if (x->numel == 3) abort(); return OPJIT_OK")
    told = kernel.printed(dies.replace("OPTIONS", '--test "x, 2.0" --reference plain'))
    assert "the kernel died of SIGABRT on (float32 (3,), 2.0)" in told
    assert "opjit test" not in told
    assert kernel.printed("print('alive')") == "alive\n"


def test_flags_and_a_fake_kernel(kernel: Kernel) -> None:
    kernel.printed("def shape(x):\n    return x.new_empty(7)")
    kernel.printed("""%%opjit --fake shape --cflags "-DCOUNT=7 -O2" seven(Tensor x) -> Tensor
opjit_status seven_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    const int64_t size = COUNT;
    OPJIT_TRY(opjit_empty(out, 1, &size, x->dtype, x));
    memset(out->data, 0, COUNT * sizeof(float));
    return OPJIT_OK;
}""")
    assert (
        kernel.printed("print(seven(x).shape, seven(x.to('meta')).shape)")
        == "torch.Size([7]) torch.Size([7])\n"
    )


@pytest.mark.slow
def test_the_example_shows_what_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file keeps the outputs of a run: this one's, apart from times, paths and names of CPUs."""
    book = nbformat.read(ROOT / "examples" / "notebook" / "prototype.ipynb", as_version=4)
    if toolchain.find_nvcc(None) is None and toolchain.find_nvrtc("cuda13", None) is None:
        book.cells = [cell for cell in book.cells if "--cuda" not in cell.source]
    kept = [shown(cell) for cell in book.cells if cell.cell_type == "code"]
    with started(tmp_path, monkeypatch, book) as client:
        client.allow_error_names = ["CompileError"]
        for index, cell in enumerate(book.cells):
            if cell.cell_type == "code":
                client.execute_cell(cell, index)
    assert [shown(cell) for cell in book.cells if cell.cell_type == "code"] == kept
    assert "ready in" in kept[1]
    assert [index for index, text in enumerate(kept) if "error:" in text] == [5]


def shown(cell: Any) -> str:
    """What a code cell shows, without numbers that differ between runs."""
    texts = [
        output.get("text") or output.get("traceback") or output.data["text/plain"]
        for output in cell.outputs
    ]
    text = "\n".join("".join(text) for text in texts).partition("\nfull output")[0]
    text = re.sub(r" \(\d+\.\d s\)$", "", text, flags=re.MULTILINE)  # of a check, if it was slow
    differs = (
        r"\d+\.\d+( m?s| us)?|\d+ (m?s|us)\b|x86-64-v\d|sm_90\.cuda\d+|\d+ shapes, \d+ rejected|─+"
    )
    return re.sub(r" +", " ", re.sub(differs, "…", text))


@pytest.mark.parametrize(
    ("line", "schema", "options"),
    [
        ("scale(Tensor x) -> Tensor", "scale(Tensor x) -> Tensor", {}),
        (
            "--like x scale(Tensor x, float a=-1) -> Tensor --cuda",
            "scale(Tensor x, float a=-1) -> Tensor",
            {"like": "x", "cuda": True},
        ),
        (
            'f(Tensor x, str mode="a") -> () --bench="x, \'b\'"',
            'f(Tensor x, str mode="a") -> ()',
            {"bench": "x, 'b'"},
        ),
        (
            "f(Tensor x) -> Tensor --bench \"x\" --cflags '-DA=1 -O2'",
            "f(Tensor x) -> Tensor",
            {"bench": "x", "cflags": "-DA=1 -O2"},
        ),
    ],
)
def test_the_line_is_a_schema_and_options_in_any_order(
    line: str, schema: str, options: dict[str, str]
) -> None:
    found, given = notebook.parse(line)
    assert (found, {name: value for name, value in given.items() if value}) == (schema, options)


def test_a_cell_of_both_languages_keeps_its_line_numbers() -> None:
    for separator in ("  // cuda  ", "//cuda", "//\tcuda"):
        cell = f"int c;\n{separator}\nint cuda;\n// cuda kernels are below\n"
        sources = notebook.split(cell, cuda=False)
        assert sources["cpu"].splitlines() == ["", "int c;"]
        assert sources["cuda"].splitlines() == [
            "",
            "",
            "",
            "int cuda;",
            "// cuda kernels are below",
        ]
    assert notebook.split("int c;\n", cuda=False) == {"cpu": "\nint c;\n"}
    assert notebook.split("int c;\n", cuda=True) == {"cuda": "\nint c;\n"}
