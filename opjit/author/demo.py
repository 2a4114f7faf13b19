"""``opjit demo``: builds, loads and times an op on every device of the machine, in a few seconds.

Two fresh processes import torch, which takes seconds where it lies on a cold disk, and this one does not. The first builds allreduce for
every device into an empty cache. The second loads them from there, calls each on a million random numbers and compares it with torch.
Without a GPU, a machine with a compiler for CUDA builds the CUDA op and runs nothing. In the end the binaries are in the user's own cache.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opjit.measure.units import format_time
from opjit.store.store import default_root

if TYPE_CHECKING:
    import torch
    from rich.console import Console

_COUNT = 1 << 20
_WITHOUT_GPU = "sm_90"  # the arch that is built without a GPU
_ELSEWHERE = ("OPJIT_LAYERS", "OPJIT_REMOTE", "OPJIT_OFFLINE")  # these would find the op somewhere, or forbid to build it
_CHILD = """
import torch
from time import perf_counter
started = perf_counter()
import opjit
from opjit.author import demo
demo.report(demo.{function})
"""


def show(console: Console, errors: Console) -> None:
    """Run the demo; print its table on a console, and its progress on another.

    Raises:
        OpjitError: a process failed, or a result is wrong.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title="allreduce: the sum of 2^20 float32", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("built for", no_wrap=True, style="cyan")
    for name in ("cold", "warm", "call", "torch.sum", "ratio", "error", "torch's"):
        table.add_column(name, justify="right", no_wrap=True, style="bold" if name in ("cold", "warm") else "")
    with tempfile.TemporaryDirectory(prefix="opjit-demo-") as cache:
        with errors.status("building allreduce"):
            cold = _measured(f"build, {str(default_root())!r}, started", cache)
        with errors.status("loading allreduce in a fresh process"):
            warm = _measured(f"load, {list(cold['built'])!r}, started", cache)
    for device, built in cold["built"].items():
        table.add_row(*_row(device, built, warm[device]))
    if cold["unused"]:
        table.add_row(cold["unused"]["target"], format_time(cold["unused"]["get"]))
    console.print(table)
    console.print("cold: import opjit, compile, link, verify, load\n"
                  "warm: import opjit and load from the cache, in a fresh process\n"
                  "call: the median of turns; error: the difference from the sum in float64")
    if cold["unused"]:
        console.print(f"No GPU is here: the CUDA op was built for {_WITHOUT_GPU}, and did not run.")
    opjit = _command()
    console.print(f"\nThe binaries, with all that they were made from, lie in\n  {_short(default_root())}/v1/opjit.allreduce\n"
                  "\nTry next: an op of your own, its checks, its speed\n"
                  f"  [bold]{opjit} new mylib::scale_add[/]\n  [bold]{opjit} test ./scale_add[/]\n  [bold]{opjit} bench ./scale_add[/]",
                  soft_wrap=True)


def _row(device: str, cold: dict[str, Any], warm: dict[str, Any]) -> list[str]:
    """Format a device's row of the table. Raises OpjitError if a result is wrong."""
    from opjit.errors import OpjitError

    if warm["error"] > 1e-3 or cold["result"] != warm["result"]:
        raise OpjitError(f"wrong results on {device}: cold {cold['result']}, warm {warm['result']}, error {warm['error']}")
    times = [format_time(seconds) for seconds in (cold["get"], warm["get"], warm["call"], warm["torch"])]
    return [cold["target"], *times, f"{warm['call'] / warm['torch']:.2f}", f"{warm['error']:.0e}", f"{warm['torch_error']:.0e}"]


def _measured(code: str, cache: str) -> dict[str, Any]:
    """Return what a fresh process measures. Raises OpjitError if it failed."""
    variables = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    result = subprocess.run([sys.executable, "-c", _CHILD.format(function=code)], capture_output=True, text=True, check=False,
                            env={**variables, "OPJIT_CACHE": cache, "OPJIT_VERBOSE": "0"})
    from opjit.errors import OpjitError

    if result.returncode:
        raise OpjitError(f"the demo's process failed:\n{result.stderr.strip()}")
    measured: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    if "failed" in measured:
        raise OpjitError(measured["failed"])
    return measured


def report(work: Callable[..., dict[str, Any]], *arguments: Any) -> None:
    """Print as JSON what a function measures in a fresh process, or its error."""
    from opjit.errors import OpjitError

    try:
        print(json.dumps(work(*arguments)))
    except OpjitError as error:
        print(json.dumps({"failed": str(error)}))


def build(root: str, started: float) -> dict[str, Any]:
    """Build the op for every device in a process that imports opjit since `started`, call it, and put the binaries into the cache `root`,
    too. Each device's time has that of the imports."""
    from opjit import api, backends, request, wanted
    from opjit.backends import targets
    from opjit.declare import registry
    from opjit.errors import ToolMissing
    from opjit.store.store import Store

    request.import_builder()
    imported = time.perf_counter() - started
    op, built, unused = registry.find("allreduce"), dict[str, Any](), None
    for device in op.devices():
        target = targets.here(backends.for_device(device))
        began = time.perf_counter()
        allreduce = api.get("allreduce", device)
        seconds = imported + time.perf_counter() - began
        built[device] = {"target": str(target), "get": seconds, "result": allreduce(_numbers(device)).item()}
        request.entry(op, target, Store(Path(root)))
    if "cuda" not in built:
        with suppress(ToolMissing):
            target = wanted.target_of("cuda", _WITHOUT_GPU)
            began = time.perf_counter()
            request.entry(op, target)
            unused = {"target": str(target), "get": imported + time.perf_counter() - began}
            request.entry(op, target, Store(Path(root)))
    return {"built": built, "unused": unused}


def load(devices: Sequence[str], started: float) -> dict[str, Any]:
    """Load the op for each device in a process that imports opjit since `started`, and call it in turns with torch. Each device's time has
    that of the imports."""
    from opjit import api

    imported, measured = time.perf_counter() - started, dict[str, Any]()
    for device in devices:
        began = time.perf_counter()
        allreduce = api.get("allreduce", device)
        seconds = imported + time.perf_counter() - began
        measured[device] = {"get": seconds, **_compared(allreduce, device)}
    return measured


def _compared(allreduce: Callable[..., torch.Tensor], device: str) -> dict[str, float]:
    """Measure the seconds per call of the op and of torch.sum, the op's result, and the errors of both."""
    import torch

    from opjit.measure.plan import Inputs
    from opjit.measure.timing import measure, plan_of

    x = _numbers(device)
    exact = x.double().sum().item()
    with torch.inference_mode():
        call, plain = measure(plan_of({"opjit": allreduce, "torch": torch.sum}, Inputs((x,)), device, moved=x.nbytes)).values()
        result = allreduce(x).item()
        return {"call": call.median, "torch": plain.median, "result": result, "error": abs(result - exact),
                "torch_error": abs(torch.sum(x).item() - exact)}


def _numbers(device: str) -> torch.Tensor:
    """Make the same random numbers in every process."""
    import torch

    torch.manual_seed(0)
    return torch.randn(_COUNT, device=device)


def _command() -> str:
    """Return the command as this process was started, for a shell in this folder."""
    called = Path(sys.argv[0])
    if called.name != "opjit":
        return f"{shlex.quote(sys.executable)} -m opjit"
    found = shutil.which("opjit")
    return "opjit" if found and called.exists() and os.path.samefile(found, called) else shlex.quote(sys.argv[0])


def _short(path: Path) -> str:
    """Shorten a path, with ``~`` for the home directory."""
    home = os.path.expanduser("~")
    return f"~{str(path)[len(home):]}" if home != "/" and str(path).startswith(f"{home}/") else str(path)
