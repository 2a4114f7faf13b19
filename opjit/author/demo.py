"""``opjit demo``: two fresh processes get allreduce for every device, one with an empty cache and one with the binaries of the first. Each
compares it with torch. This process does not import torch, because the import takes seconds. Without a GPU, the CUDA op is only built."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from opjit.errors import OpjitError
from opjit.measure.units import busy_note, format_time
from opjit.store.store import default_root

if TYPE_CHECKING:
    from rich.console import Console

_WITHOUT_GPU = "sm_90"  # the arch that is built without a GPU
_CASE = "float32 2^20"  # the workload
# These would find the op somewhere, or forbid to build it.
_ELSEWHERE = (
    "OPJIT_LAYERS",
    "OPJIT_REMOTE",
    "OPJIT_OFFLINE",
)
_CHILD = """
import sys, torch
from time import perf_counter
started = perf_counter()
import opjit
from opjit.author import demo
from opjit.errors import OpjitError
try:
    demo.report(started, {root!r})
except OpjitError as error:
    sys.exit(str(error))
"""


def show(console: Console, errors: Console) -> None:
    """Run the demo; print its table on a console, and its progress on another. Raises OpjitError where one fails or a result is wrong."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    with tempfile.TemporaryDirectory(prefix="opjit-demo-") as cache:
        with errors.status("building allreduce"):
            cold = _fresh(cache)
        with errors.status("loading allreduce in a fresh process"):
            warm = _fresh(cache)
    table = Table(
        title="allreduce: the sum of 2^20 float32",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("built for", no_wrap=True, style="cyan")
    for name in ("cold", "warm", "call", "torch.sum", "speed", "error", "torch's"):
        style = "bold" if name in ("cold", "warm") else ""
        table.add_column(name, justify="right", no_wrap=True, style=style)
    for target, first in cold.items():
        table.add_row(target, *_format_target(first, warm[target]))
    console.print(table)
    console.print(
        "cold: import opjit, compile, link, verify, load\n"
        "warm: import opjit and load from the cache, in a fresh process\n"
        "call: the median of turns; speed: above 1x, opjit is faster than torch.sum\n"
        "error: the difference from the sum in float64, relative to it"
    )
    busy = busy_note()
    if busy:
        console.print(busy, soft_wrap=True)
    if any("call" not in first for first in cold.values()):
        console.print(f"No GPU found: the CUDA op was built for {_WITHOUT_GPU}, but not run.")
    opjit = "opjit" if shutil.which("opjit") else f"{shlex.quote(sys.executable)} -m opjit"
    console.print(
        f"\nThe binaries and their manifests are in\n  {default_root()}/v2/opjit.allreduce\n"
        "\nNext: write an op, test it, and compare its speed with torch\n"
        f"  [bold]{opjit} new mylib::scale_add[/]\n  [bold]{opjit} test ./scale_add[/]\n  [bold]{opjit} bench ./scale_add[/]",
        soft_wrap=True,
    )


def _format_target(cold: dict[str, float], warm: dict[str, float]) -> list[str]:
    """Format a target's cells."""
    if "call" not in cold:
        return [format_time(cold["get"])]
    times = (cold["get"], warm["get"], warm["call"], warm["torch"])
    speed = f"{warm['torch'] / warm['call']:.2f}x"
    return [
        *map(format_time, times),
        speed,
        *(f"{warm[name]:.0e}" for name in ("error", "torch_error")),
    ]


def _fresh(cache: str) -> dict[str, dict[str, float]]:
    """Return the measurements of a fresh process, by target. Raises OpjitError if it failed."""
    variables = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    result = subprocess.run(
        [sys.executable, "-c", _CHILD.format(root=str(default_root()))],
        capture_output=True,
        text=True,
        check=False,
        env={**variables, "OPJIT_CACHE": cache, "OPJIT_VERBOSE": "0", "OPJIT_CPP_AUTOGRAD": "0"},
    )
    if result.returncode:
        raise OpjitError(f"the demo's process failed:\n{result.stderr.strip()}")
    measured: dict[str, dict[str, float]] = json.loads(result.stdout.splitlines()[-1])
    return measured


def report(started: float, root: str) -> None:
    """Print, as JSON, the measurements of a process that imports opjit since `started`; copy the binaries to the cache `root`.

    It gets the op for each device, and calls it. Each time includes the imports."""
    from opjit import api, request, wanted
    from opjit.author import bench
    from opjit.catalog import registry
    from opjit.errors import ToolMissing
    from opjit.store.store import Store

    imported = time.perf_counter() - started
    op = registry.find("allreduce")
    here = op.devices()
    measured = {}
    for device in dict.fromkeys([*here, "cuda"]):
        try:
            target = wanted.target_of(device, None if device in here else _WITHOUT_GPU)
            began = time.perf_counter()
            request.entry(op, target)
            called = api.get("allreduce", device) if device in here else None
            row = {"get": imported + time.perf_counter() - began}
        except ToolMissing:
            if device in here:
                raise
            continue
        if called is not None:
            case = next(each for each in op.workloads_on(device) if each.label == _CASE)
            found = bench.compare_on(op, called, device, case)
            row |= {"call": found.ours.median, "torch": found.theirs.median}
            row |= {"error": found.error, "torch_error": found.reference_error}
        measured[str(target)] = row
        request.entry(op, target, Store(Path(root)))
    print(json.dumps(measured))
