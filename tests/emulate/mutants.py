"""Mutants of opjit's kernels: a barrier or an atomic is removed from the text of a kernel's file.

python -m tests.emulate.mutants           each mutant, emulated: where a race or a read of unwritten memory is found
python -m tests.emulate.mutants --gpu     the verdicts on a GPU next to the emulated ones, of mutants and of the ops' samples
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from opjit.catalog import arguments
from opjit.declare.sample import Sample
from opjit.emulate import build
from opjit.emulate.translate import synchronization
from opjit.operators.op import Op
from opjit.testing.compare import assert_same
from opjit.testing.samples import effects
from tests.helpers import ROOT

MUTATED = (
    "kernels_c/allreduce/allreduce.cu",
    "kernels_c/lltm/lltm.cu",
    "examples/07_from_cpp/c/all_reduce.cu",
    "examples/15_top_k/sample_top_k/sample_top_k.cu",
    "examples/18_cuda_on_a_laptop/row_sum/row_sum.cu",
)
OTHERS = (
    "kernels_c/add_custom",
    "kernels_c/round_ste",
    "kernels_c/tensor_negate",
    "examples/04_rms_norm_rope",
    "examples/06_from_caffe/round",
)
_BARRIER = re.compile(r"__syncthreads\(\)|\S+\.sync\(\)")
_ADD = re.compile(r"atomicAdd\((.+), (\w+)\);")
_MAX = re.compile(r"atomicMax\((.+), (\w+)\);")
_BUNDLED = re.compile(r"""(@opjit\.op\(\s*["'])(\w+\()""")
# The most elements of a sample, and calls of an op: checks take a microsecond for each access.
_LIMITS = {"cuda": (50_000, 24), "fast": (50_000, 24), "checked": (50_000, 60)}
_LONG = 30.0  # CPU seconds after which no more calls are made with checks
_SEEDS = (1, 2, 3)
_PLACE = re.compile(r"[\w.]+\.cu:(\d+)|line (\d+)")


class Mutant(NamedTuple):
    """A kernel's file, and the line from which a barrier or an atomic is removed."""

    path: str
    line: int

    def text(self) -> str:
        """Return the file without the barrier, or with a plain update in the place of the atomic."""
        lines = (ROOT / self.path).read_text(encoding="utf-8").splitlines(keepends=True)
        line = lines[self.line - 1]
        changed = _BARRIER.sub("(void)0", line)
        changed = _ADD.sub(r"*(\1) += \2;", changed)
        changed = _MAX.sub(r"*(\1) = max(*(\1), \2);", changed)
        assert changed != line, self
        lines[self.line - 1] = changed
        return "".join(lines)

    def folder(self, into: Path) -> Path:
        """Copy the op's folder, with the mutated file."""
        source = ROOT / self.path
        shutil.copytree(source.parent, into, ignore=shutil.ignore_patterns("__pycache__"))
        (into / source.name).write_text(self.text(), encoding="utf-8")
        declared = (into / "op.py").read_text(encoding="utf-8")
        named = _BUNDLED.sub(r"\1mutant::\2", declared)  # only opjit's folders need no namespace
        (into / "op.py").write_text(named, encoding="utf-8")
        return into


def mutants() -> list[Mutant]:
    """Every barrier and atomic of the files."""
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in MUTATED}
    return [Mutant(path, line) for path, text in texts.items() for line in synchronization(text)]


# ----------------------------------------------------------------------------------------------
# Verdicts


def _calls(op: Op, device: str, largest: int) -> Iterator[tuple[Sample, Any]]:
    """Yield small calls of an op with what its reference returns."""
    generator = torch.Generator().manual_seed(0)
    if op.qualified == "from_c::all_reduce":
        for size in (1, 31, 1000, 4097):
            x = torch.randint(-99, 99, (size,), generator=generator).int()
            yield Sample((x.to(device),)), [x.sum().int().reshape(1)]
    elif op.qualified == "demo::sample_top_k":
        for rows, columns, k in ((1, 10, 1), (3, 300, 1), (2, 1000, 7)):
            logits = torch.randn(rows, columns, generator=generator)
            yield Sample((logits.to(device), k, 1e-4)), [logits.argmax(1)]
    else:
        for sample in op.samples_on(device):
            if sample.numel <= largest:
                yield sample, effects(op.reference_function, op, sample)


def _verdict(op: Op, sample: Sample, expected: Any) -> str:
    try:
        found = effects(op.overload, op, sample)
        assert_same([_on_cpu(each) for each in found], [_on_cpu(each) for each in expected], sample)
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return "right"


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def judge(folder: str, device: str) -> dict[str, list[str]]:
    """Return the verdict on each call of the ops of a folder. `device` is ``cuda``, ``fast`` or ``checked``, which are emulated."""
    found: dict[str, list[str]] = {}
    for op in arguments.ops(folder):
        if device != "cuda":
            checked = device == "checked"
            build.install_emulated(op, checked)
        largest, count = _LIMITS[device]
        calls = islice(_calls(op, "cuda" if device == "cuda" else "cpu", largest), count)
        seeds = _SEEDS if device == "checked" else (1,)
        verdicts = found.setdefault(op.qualified, [])
        for sample, expected in calls:
            for seed in seeds:
                build.runtime().emu_set_seed(seed)
                verdicts.append(_verdict(op, sample, expected))
                if " emulated: " in verdicts[-1]:
                    return found
            if device == "checked" and time.process_time() > _LONG:
                break
    return found


def judged(folder: Path, device: str) -> dict[str, list[str]]:
    """The same in a process of its own."""
    words = [sys.executable, "-m", __name__ if __name__ != "__main__" else "tests.emulate.mutants"]
    done = subprocess.run(
        [*words, "--judge", str(folder), device],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{folder} on {device}: {done.stderr[-2000:]}")
    verdicts: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return verdicts


def found_at(mutant: Mutant) -> tuple[list[int], str]:
    """Return the lines that the findings on a mutant name, and the first finding."""
    with tempfile.TemporaryDirectory() as folder:
        verdicts = judged(mutant.folder(Path(folder) / Path(mutant.path).parent.name), "checked")
    texts = [text for each in verdicts.values() for text in each if " emulated: " in text]
    lines = {int(one or other) for text in texts for one, other in _PLACE.findall(text)}
    return sorted(lines), (texts or [""])[0]


def around(mutant: Mutant) -> set[int]:
    """The lines of the function around a mutant's line, whose accesses the removed barrier or atomic had ordered."""
    lines = (ROOT / mutant.path).read_text(encoding="utf-8").splitlines()
    start = max(n for n in range(1, mutant.line) if lines[n - 1].startswith("{"))
    end = min(n for n in range(mutant.line, len(lines) + 1) if lines[n - 1].startswith("}"))
    return set(range(start, end + 1))


def _summary(verdicts: dict[str, list[str]]) -> str:
    every = [each for row in verdicts.values() for each in row]
    wrong = [each for each in every if each != "right"]
    return f"{len(every) - len(wrong)} right, {len(wrong)} wrong" + (
        f" ({wrong[0][:90]})" if wrong else ""
    )


def _compare(work: Path) -> int:
    """Print the verdicts on a GPU next to the emulated ones. Returns the number of different verdicts on the ops' samples."""
    folders = {path: ROOT / path for path in OTHERS}
    folders |= {str(Path(path).parent): (ROOT / path).parent for path in MUTATED}
    for number, mutant in enumerate(mutants()):
        name = f"{mutant.path}:{mutant.line} removed"
        folders[name] = mutant.folder(work / str(number) / Path(mutant.path).parent.name)
    ways = [(name, device) for name in folders for device in ("cuda", "fast", "checked")]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 2)) as pool:
        results = dict(
            zip(ways, pool.map(lambda way: judged(folders[way[0]], way[1]), ways), strict=True)
        )
    different = 0
    for name in folders:
        on_gpu = results[name, "cuda"]
        emulated = results[name, "fast"]
        checked = results[name, "checked"]
        pairs = [
            ((one == "right"), (other == "right"))
            for op in on_gpu
            for one, other in zip(on_gpu[op], emulated.get(op, []), strict=False)
        ]
        unlike = sum(one != other for one, other in pairs)
        if not name.endswith(" removed"):
            different += unlike
        print(f"{name}: {len(pairs)} calls, {unlike} of them with different verdicts")
        print(f"    GPU: {_summary(on_gpu)}")
        print(f"    emulated: {_summary(emulated)}")
        print(f"    emulated, checked: {_summary(checked)}")
    return different


def main(words: list[str]) -> int:
    if words[:1] == ["--judge"]:
        print(json.dumps(judge(words[1], words[2])))
        return 0
    if words == ["--gpu"]:
        with tempfile.TemporaryDirectory() as work:
            different = _compare(Path(work))
        print(f"{different} verdicts on the ops' samples differ")
        return different
    missed = 0
    for mutant in mutants():
        lines, finding = found_at(mutant)
        found = bool(around(mutant) & set(lines))
        missed += not found
        print(
            f"{mutant.path}:{mutant.line} removed, emulated: {finding if found else 'NOT FOUND ' + finding}",
            flush=True,
        )
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
