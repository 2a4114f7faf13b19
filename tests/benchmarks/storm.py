"""Many processes, a few cold ops, and builders that are killed at random.

    python tests/benchmarks/storm.py [--rounds 10] [--processes 64] [--ops 8] [--seed N]

In each round every process asks for all ops, in an order of its own, and a third of them get SIGKILL at a random moment, half of
these together with the compilers that they started. What must hold then:

- every survivor has computed the right results, without a warning;
- no lock is held;
- each key was compiled at most once, and once more for each killed process that had begun it;
- each key has one entry, and all of them verify;
- what the killed left in the staging folder is swept as soon as it is a day old.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils import cpp_extension

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from common import Row, seconds, show  # noqa: E402

from tests.locks import is_held  # noqa: E402

OP_PY = """
import torch
import opjit


@opjit.op("storm::op{number}(Tensor x) -> Tensor")
def op{number}(x):
    return torch.empty_like(x)
"""
SOURCE = """
#include "opjit.h"
#include "amount.h"

opjit_status op{number}_cpu(const opjit_tensor *x, opjit_tensor *out)
{{
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[i] = ((const float *)x->data)[i] + AMOUNT;
    return OPJIT_OK;
}}
"""
# Notes the op, and the process that asked for it, each time an op is compiled.


class Outcome(NamedTuple):
    """What one round left, summed over all of them for the table.

    Attributes:
        wrong: survivors that ended otherwise than with right results.
        killed: processes that were ended before they were done.
        compiled: how often an op was compiled.
        excess: compilations that neither the first of a key nor a killed process explains.
        held: locks that somebody still holds.
        bad: entries that do not verify, or that are missing.
        left: folders in the staging folder.
    """

    wrong: int
    killed: int
    compiled: int
    excess: int
    held: int
    bad: int
    left: int


def make_cold(scratch: Path, ops: int, amount: int) -> None:
    """Give every op another content."""
    for number in range(ops):
        (scratch / f"op{number}" / "amount.h").write_text(f"#define AMOUNT {amount}.0f\n")


def work(ops: int, amount: float, generator: random.Random, log: Path) -> int:
    """A process's part; its exit code."""
    import opjit

    warnings.simplefilter("error")
    load = cpp_extension.load

    def logged(*arguments: Any, **named: Any) -> Any:
        with log.open("a") as file:
            file.write(f"op{number} {os.getpid()}\n")
        return load(*arguments, **named)

    cpp_extension.load = logged  # opjit builds by it
    for number in generator.sample(range(ops), ops):
        x = torch.full((4,), float(number))
        if not torch.equal(opjit.get(f"storm::op{number}", "cpu")(x), x + amount):
            return 3
    return 0


def start(count: int, ops: int, amount: float, seed: int, log: Path) -> list[int]:
    """Fork the processes; they begin together."""
    gate = os.pipe()
    children = []
    for index in range(count):
        child = os.fork()
        if child == 0:
            code = 4
            try:
                os.setsid()
                os.close(gate[1])
                os.read(gate[0], 1)  # returns when the parent closes the other end
                code = work(ops, amount, random.Random(seed + index), log)
            except BaseException as error:
                print(
                    f"process {os.getpid()}: {type(error).__name__}: {error}",
                    file=sys.stderr,
                    flush=True,
                )
            finally:
                os._exit(code)
        children.append(child)
    os.close(gate[0])
    os.close(gate[1])
    return children


def play(
    children: list[int], generator: random.Random, span: float
) -> tuple[dict[int, int], float]:
    """Kill a third of the processes within `span` seconds; the wait status of each, and how long the last one took."""
    began = time.monotonic()
    victims = [
        (generator.uniform(0, span), child, generator.random() < 0.5)
        for child in generator.sample(children, len(children) // 3)
    ]
    status: dict[int, int] = {}
    for when, child, with_compilers in sorted(victims):
        time.sleep(max(0.0, began + when - time.monotonic()))
        ended, code = os.waitpid(child, os.WNOHANG)
        if ended:  # it was done before
            status[child] = code
        elif with_compilers:
            os.killpg(child, signal.SIGKILL)
        else:
            os.kill(child, signal.SIGKILL)
    for child in children:
        if child not in status:
            status[child] = os.waitpid(child, 0)[1]
    return status, time.monotonic() - began


def judge(status: dict[int, int], log: Path, ops: int, expected_entries: int) -> Outcome:
    """Look at what a round has left."""
    from opjit import errors, files
    from opjit.backends import cpu, targets
    from opjit.store import inventory, store
    from opjit.store.entry import verify

    killed = {
        child
        for child, code in status.items()
        if os.WIFSIGNALED(code) and os.WTERMSIG(code) == signal.SIGKILL
    }
    begun: dict[str, Counter[int]] = {f"op{number}": Counter() for number in range(ops)}
    for text in log.read_text().splitlines():
        name, process = text.split()
        begun[name][int(process)] += 1
    excess = sum(
        max(0, sum(by.values()) - 1 - sum(1 for process in by if process in killed))
        for by in begun.values()
    )
    root = store.Store(store.default_root())
    target = targets.here(cpu.Cpu())
    good = 0
    for entry in (item.folder for item in inventory.scan(root)):
        try:
            verify(entry, target)
            good += 1
        except (OSError, errors.EntryError) as error:
            print(f"{entry}: {error}", file=sys.stderr)
    return Outcome(
        sum(1 for child, code in status.items() if code != 0 and child not in killed),
        len(killed),
        sum(sum(by.values()) for by in begun.values()),
        excess,
        sum(map(is_held, files.local_folder().glob("*.lock"))),
        abs(expected_entries - good),
        sum(1 for _ in (root.base / "staging").iterdir()),
    )


def sweep(ops: int, amount: float, log: Path) -> int:
    """Make what was left a day old, build once more; how much is still there."""
    from opjit.store import store

    staging = store.Store(store.default_root()).base / "staging"
    old = time.time() - 86400 - 60
    for left in staging.iterdir():
        os.utime(left, (old, old))
    (child,) = start(1, ops, amount, 0, log)
    code = os.waitpid(child, 0)[1]
    return sum(1 for _ in staging.iterdir()) + (code != 0)


def prepare(scratch: Path, ops: int) -> Path:
    """Declare the ops, and import what a build needs; returns the log of builds."""
    (scratch / "tmp").mkdir()
    os.environ.update(
        OPJIT_CACHE=str(scratch / "cache"),
        TMPDIR=str(scratch / "tmp"),
    )
    tempfile.tempdir = None
    import opjit
    from opjit import request
    from opjit.recipe import toolchain

    request.import_builder()
    toolchain.require_compiler(scratch / "cache" / "v2" / "toolchain")
    torch.set_num_threads(1)
    for number in range(ops):
        folder = scratch / f"op{number}"
        folder.mkdir()
        (folder / "op.py").write_text(OP_PY.format(number=number))
        (folder / f"op{number}.c").write_text(SOURCE.format(number=number))
        (folder / "amount.h").write_text("")
        opjit.add_path(folder)
    gc.collect()
    gc.freeze()
    return scratch / "log"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--ops", type=int, default=8)
    parser.add_argument("--seed", type=int, default=random.randrange(10**9))
    chosen = parser.parse_args()
    # Forks of a process with threads: torch's, which sleep.
    warnings.simplefilter("ignore", DeprecationWarning)
    print(f"seed {chosen.seed}", flush=True)
    generator = random.Random(chosen.seed)
    span = 0.15 * chosen.ops
    outcomes = []
    spent = []  # an op takes longer than that
    with tempfile.TemporaryDirectory(prefix="storm-") as name:
        scratch = Path(name)
        log = prepare(scratch, chosen.ops)
        for turn in range(1, chosen.rounds + 1):
            make_cold(scratch, chosen.ops, turn)
            log.write_text("")
            seed = generator.randrange(10**9)
            children = start(chosen.processes, chosen.ops, float(turn), seed, log)
            status, took = play(children, generator, span)
            outcomes.append(judge(status, log, chosen.ops, chosen.ops * turn))
            spent.append(took)
            span = took * 0.8  # most of them are still at work then
            print(f"round {turn}: {seconds(took)}, {outcomes[-1]}", flush=True)
        make_cold(scratch, chosen.ops, chosen.rounds + 1)
        unswept = sweep(chosen.ops, chosen.rounds + 1.0, log)
        left = outcomes[-1].left
    total = Outcome(*map(sum, zip(*outcomes, strict=True)))
    started = chosen.rounds * chosen.processes
    rows = [
        verdict("survivors that failed", total.wrong, f"of {started - total.killed}"),
        verdict("compilations too many", total.excess, f"of {total.compiled}"),
        verdict("locks still held", total.held, ""),
        verdict("entries missing or bad", total.bad, f"of {chosen.ops * chosen.rounds}"),
        verdict("left in staging after a day", unswept, f"of {left}"),
        Row(
            "processes killed",
            f"of {started}",
            "",
            str(total.killed),
            "> 0",
            "PASS" if total.killed else "FAIL",
        ),
    ]
    title = f"{chosen.rounds} rounds of {chosen.processes} processes on {chosen.ops} cold ops"
    show(f"{title} ({seconds(sum(spent))}; seed {chosen.seed})", rows)
    sys.exit(int(any(row.verdict == "FAIL" for row in rows)))


def verdict(what: str, found: int, of: str) -> Row:
    return Row(what, of, "", str(found), "0", "FAIL" if found else "PASS")


if __name__ == "__main__":
    main()
