"""``opjit demo``: builds, loads and times an op on every device of the machine, in a few seconds.

Each device gets two fresh processes: a cold one builds allreduce into an empty cache, and a warm one loads it from there. Both call it
on a million random numbers and compare it with torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

_COUNT = 1 << 20
_CHILD = """
import torch
from time import perf_counter as now
started = now()
import opjit
opjit.get("allreduce", {device!r})
seconds = now() - started
from opjit.author.demo import report
report({device!r}, seconds)
"""


def show() -> int:
    """Run the demo and print its table. Returns the command's exit code: 1 if a result is wrong."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from opjit.declare import catalog

    console, errors = Console(highlight=False), Console(stderr=True)
    table = Table(title="allreduce: the sum of 2^20 float32", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("built for", no_wrap=True)
    for name in ("cold", "warm", "call", "torch.sum", "ratio", "error", "torch's"):
        table.add_column(name, justify="right", no_wrap=True)
    for device in catalog.find("allreduce").devices():
        with tempfile.TemporaryDirectory(prefix="opjit-demo-") as cache:
            with errors.status(f"building allreduce for {device}"):
                cold = _measure(device, cache)
            with errors.status(f"loading allreduce for {device} in a fresh process"):
                warm = _measure(device, cache)
        table.add_row(warm["target"], f"{cold['get']:.3f} s", f"{1e3 * warm['get']:.1f} ms", f"{1e6 * warm['call']:.1f} us",
                      f"{1e6 * warm['torch']:.1f} us", f"{warm['call'] / warm['torch']:.2f}",
                      f"{warm['error']:.0e}", f"{warm['torch_error']:.0e}")
        if abs(warm["error"]) > 1e-3 or cold["result"] != warm["result"]:
            errors.print(f"wrong results on {device}: cold {cold['result']}, warm {warm['result']}, error {warm['error']}")
            return 1
    console.print(table)
    console.print("cold: import opjit, compile, link, verify, load\n"
                  "warm: import opjit and load from the cache, in a fresh process\n"
                  "call: the median; error: the difference from the sum in float64")
    return 0


def _measure(device: str, cache: str) -> dict[str, Any]:
    result = subprocess.run([sys.executable, "-c", _CHILD.format(device=device)], capture_output=True, text=True, check=False,
                            env={**os.environ, "OPJIT_CACHE": cache, "OPJIT_VERBOSE": "0"})
    if result.returncode:
        from opjit.errors import OpjitError

        raise OpjitError(f"the demo's process for {device} failed:\n{result.stderr.strip()}")
    measured: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return measured


def report(device: str, seconds: float) -> None:
    """In the fresh process, after a get that took `seconds`: call the op, compare it with torch, and print the numbers as JSON."""
    import torch
    from torch.utils.benchmark import Timer

    from opjit import api, backends
    from opjit.backends import targets

    allreduce = api.get("allreduce", device)
    torch.manual_seed(0)
    x = torch.randn(_COUNT, device=device)
    exact = x.double().sum().item()
    with torch.inference_mode():
        timers = [Timer("f(x)", globals={"f": f, "x": x}, num_threads=torch.get_num_threads()) for f in (allreduce, torch.sum)]
        call, plain = (timer.blocked_autorange(min_run_time=0.2).median for timer in timers)
        result = allreduce(x).item()
        print(json.dumps({"target": str(targets.here(backends.for_device(device))), "get": seconds, "call": call, "torch": plain,
                          "result": result, "error": abs(result - exact), "torch_error": abs(torch.sum(x).item() - exact)}))
