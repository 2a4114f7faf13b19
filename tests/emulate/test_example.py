"""The page "CUDA on a laptop" shows what its commands print."""

import re
import shutil
from pathlib import Path

from tests.helpers import ROOT, command

PAGE = ROOT / "examples/18_cuda_on_a_laptop"
OUTPUTS = re.findall(r"^```text\n(.*?)^```$", (PAGE / "README.md").read_text("utf-8"), re.M | re.S)


def _plain(text: str) -> str:
    """Without times, and without the folder of a copy."""
    return re.sub(r"opjit test \S+", "opjit test …", re.sub(r" \(\d+\.\d s\)", "", text))


def test_the_page_shows_a_right_kernel_and_a_race(tmp_path: Path, no_gpu: None) -> None:
    folder = tmp_path / "row_sum"
    shutil.copytree(PAGE / "row_sum", folder)
    words = ("--device", "cuda", "--only", "races", "--only", "results")
    right = command("test", folder, *words)
    assert _plain(right.stdout) == OUTPUTS[0]
    source = folder / "row_sum.cu"
    head, barrier, rest = source.read_text().rpartition("        __syncthreads();\n")
    source.write_text(head + rest)
    assert barrier
    race = command("test", folder, *words)
    assert _plain(race.stdout) == _plain(OUTPUTS[1])
