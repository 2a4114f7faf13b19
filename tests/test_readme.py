"""The snippets of each README are the code that runs, and the first op does what the README says."""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opjit.recipe import toolchain
from tests.helpers import ROOT, fresh

sys.path.insert(0, str(Path(__file__).resolve().parent / "benchmarks"))
import pictures

SNIPPET = re.compile(r"<!-- snippet: (\S+)(?: (\S+))? -->\n```\w+\n(.*?)```", re.DOTALL)
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = [
    (path.relative_to(ROOT).as_posix(), *found)
    for path in (ROOT / "README.md", *sorted(ROOT.glob("examples/*/README.md")))
    for found in SNIPPET.findall(path.read_text(encoding="utf-8"))
]


def region(path: str, name: str | None) -> str:
    """A file's text, or a part of it: of C and CUDA, a function from its first line to its last brace. Of any
    other file, the part between its `begin: name` and `end: name` lines, without the indentation they share.
    """
    text = (ROOT / path).read_text(encoding="utf-8")
    if name is None:
        return text
    if path.endswith((".c", ".h", ".cu", ".cpp", ".toy")):
        function = re.search(
            rf"^(?:template [^\n]*\n)?(?=\w)[^\n;]*\b{name}\([^;]*?\n\{{\n.*?^\}}\n",
            text,
            re.DOTALL | re.MULTILINE,
        )
        assert function is not None, f"{path} has no function {name}"
        return function[0]
    lines = text.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.strip() == f"# begin: {name}")
    end = next(i for i, line in enumerate(lines) if line.strip() == f"# end: {name}")
    indent = len(lines[begin]) - len(lines[begin].lstrip())
    return (
        "\n".join(line[indent:].partition("  # type: ignore")[0] for line in lines[begin + 1 : end])
        + "\n"
    )


def test_each_example_has_a_page() -> None:
    assert [
        folder.name
        for folder in (ROOT / "examples").iterdir()
        if folder.is_dir() and not (folder / "README.md").is_file()
    ] == []


@pytest.mark.parametrize("name", ["first", "cold", "bandwidth"])
def test_a_chart_shows_the_results_that_are_kept(name: str) -> None:
    """After an edit of results: python tests/benchmarks/pictures.py."""
    results = json.loads(
        (ROOT / f"tests/benchmarks/results/{name}.json").read_text(encoding="utf-8")
    )
    assert (ROOT / f".github/pictures/{name}.svg").read_text(encoding="utf-8") == pictures.chart(
        results
    )


def test_the_picture_of_the_notebook_shows_the_cells_that_are_kept() -> None:
    """After an edit of the notebook: python tests/benchmarks/pictures.py --cell."""
    assert all_lines_of(
        (ROOT / ".github/pictures/cell.svg").read_text(encoding="utf-8")
    ) == all_lines_of(pictures.cells())


@pytest.mark.slow
def test_the_picture_of_the_terminal_has_the_lines_of_the_demo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rows depend on the machine, and the times on the hour. After a change: python tests/benchmarks/pictures.py --demo."""
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["opjit"])
    kept, now = (
        lines_of(text)
        for text in (
            (ROOT / ".github/pictures/demo.svg").read_text(encoding="utf-8"),
            pictures.terminal(),
        )
    )
    assert [line for line in kept if "opjit" not in line] == [
        line for line in now if "opjit" not in line
    ]
    assert [line.split()[-2:] for line in kept if " new " in line] == [["new", "mylib::scale_add"]]


def test_the_readme_and_the_picture_of_the_terminal_show_one_run() -> None:
    """After a new picture, copy its rows."""
    shown = re.findall(r"^ (c(?:pu|uda) (?:x86|sm_).*)$", README, re.MULTILINE)
    drawn = [
        line
        for line in all_lines_of((ROOT / ".github/pictures/demo.svg").read_text(encoding="utf-8"))
        if re.match(r"c(pu|uda) ", line)
    ]
    assert shown
    assert ["".join(line.split()) for line in shown] == ["".join(line.split()) for line in drawn]


def lines_of(svg: str) -> list[str]:
    """The lines of a terminal's picture, without rows of figures and what only a machine without a GPU or a busy one says."""
    others = r"c(pu|uda) |No GPU|the machine is busy|─|[~/]"
    return [line for line in all_lines_of(svg) if not re.match(others, line)]


def all_lines_of(svg: str) -> list[str]:
    """The lines of a terminal's picture, with one space between words."""
    rows: dict[float, list[tuple[float, str]]] = {}
    for attributes, text in re.findall(r"<text ([^>]*)>([^<]*)</text>", svg):
        place = dict(re.findall(r'(\w+)="([\d.]+)"', attributes))
        rows.setdefault(float(place["y"]), []).append((float(place["x"]), html.unescape(text)))
    lines = [
        "".join(text for _, text in sorted(rows[y])).replace("\xa0", " ").split()
        for y in sorted(rows)
    ]
    return [" ".join(words) for words in lines if words]


@pytest.mark.parametrize(("readme", "path", "name", "shown"), SNIPPETS)
def test_a_readme_snippet_is_the_file_that_runs(
    readme: str, path: str, name: str, shown: str
) -> None:
    assert shown == region(path, name or None)


def test_the_readme_has_snippets_and_both_commands() -> None:
    assert len(SNIPPET.findall(README)) == 3
    assert len(README.splitlines()) <= 170
    for command in ("demo", "test"):
        assert len(re.findall(rf"<!-- command: {command} -->\n```sh\n[^\n]+\n```", README)) == 1


@pytest.mark.torch
@pytest.mark.parametrize(
    ("example", "printed"),
    [
        (
            "01_first_op/scale.py",
            "tensor([0.0000, 2.5000, 5.0000, 7.5000]) tensor([2.5000, 2.5000, 2.5000, 2.5000])\n",
        ),
        (
            "03_gradients/clamped_square.py",
            "tensor([ 0., -2.,  1.,  0.]) [[0.0, -2.0, 1.0, 0.0], [0.0, -1.0, 0.5, 2.0]]\n",
        ),
        ("14_dropout/use.py", "[2.0, 0.0, 0.0, 2.0, 0.0, 2.0] [0.0, 0.0, 2.0, 2.0, 2.0, 2.0]\n"),
        pytest.param(
            "16_variants/use.py", "every variant's transpose is torch's\n", marks=pytest.mark.slow
        ),
        pytest.param(
            "17_across_gpus/use.py",
            "both ranks have the largest elements, the sum, and the gradients of one process\n",
            marks=pytest.mark.slow,
        ),
        ("15_top_k/use.py", "[4, 2, 4, 4, 3, 4] [3, 4, 3, 4, 4, 4]\n"),
        ("01_first_op/inline.py", "tensor([0., 1., 4., 9.])\n"),
        ("notebook/inline.py", "[2.5, 2.5, 2.5] [3.5, 3.5, 3.5]\n"),
        pytest.param(
            "08_existing_extension/use.py", "tensor([0., 1., 4., 9.])\n", marks=pytest.mark.slow
        ),
    ],
)
def test_an_example_prints_what_its_page_says(example: str, printed: str, tmp_path: Path) -> None:
    assert run(example, tmp_path) == printed


@pytest.mark.gpu
def test_the_first_cuda_op_runs(tmp_path: Path) -> None:
    assert (
        run("02_first_cuda_op/scale.py", tmp_path)
        == "tensor([0.0000, 2.5000, 5.0000, 7.5000], device='cuda:0')\n"
    )


@pytest.mark.torch
@pytest.mark.skipif(
    toolchain.find_nvcc(None) is None and toolchain.find_nvrtc("", None) is None,
    reason="no compiler for CUDA",
)
def test_the_first_cuda_op_is_built_without_a_gpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        assert (tmp_path / run("02_first_cuda_op/scale.py", tmp_path).strip()).is_file()


def run(example: str, folder: Path) -> str:
    """What an example prints in a folder, without a warning but that of torch's own opcheck, from 2.15 on."""
    opchecks = "ignore:The .grad attribute of a Tensor"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", opchecks, str(ROOT / "examples" / example)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_the_readme_calls_is_there_after_import_opjit() -> None:
    fresh(
        "import opjit; opjit.distributed.ready, opjit.testing.CHECKS, opjit.cache.path, opjit.backends.Backend, opjit.load_inline, "
        "opjit.watch, opjit.register_backend"
    )
