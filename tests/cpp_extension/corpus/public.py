"""Other people's programs, built both ways: which go the fast way, why not, and in how many seconds.

    python -m tests.cpp_extension.corpus.public FOLDER [--sample N] [--fast-only]

It reads the arguments of load_inline from each .py file of the folder, as far as they are written out, and runs none of the files. But it
opens the libraries that it builds: only for code that you trust.
"""

from __future__ import annotations

import ast
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

TAKEN = ("name", "cpp_sources", "cuda_sources", "functions", "extra_cflags", "extra_cuda_cflags", "extra_ldflags", "extra_include_paths")
PASSED = (*TAKEN[1:], "with_cuda", "with_pytorch_error_handling", "no_implicit_headers")
BUILD = """\
import json, os, sys
arguments = json.load(sys.stdin)
if sys.argv[1] == "fast":
    from opjit import load_inline
else:
    from torch.utils.cpp_extension import load_inline
    os.mkdir(arguments.setdefault("build_directory", os.path.join(os.environ["OPJIT_CACHE"], "torch")))
load_inline("public", **arguments)
"""


class Built(NamedTuple):
    """One build.

    Attributes:
        seconds: with Python's start.
        way: the headers of the manifest, or torch.
        problem: what went wrong; empty for nothing.
    """

    seconds: float
    way: str
    problem: str


def programs(text: str) -> Iterator[dict[str, Any]]:
    """The arguments of each call of load_inline in a file whose arguments can be read. Later assignments of a name win."""
    known: dict[str, Any] = {}
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            try:
                known[_name(node.targets[0])] = _value(node.value, known)
            except (KeyError, TypeError):
                continue
    for node in nodes:
        if isinstance(node, ast.Call) and _name(node.func) == "load_inline":
            given: dict[str | None, ast.expr] = dict(zip(TAKEN, node.args, strict=False))
            given.update((each.arg, each.value) for each in node.keywords)
            try:
                yield {name: _value(value, known) for name, value in given.items() if name in PASSED}
            except (KeyError, TypeError):
                continue


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _value(node: ast.AST, known: Mapping[str, Any]) -> Any:
    """Raises KeyError for anything but literals, names of literals, and their sums."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(each, known) for each in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _value(node.left, known) + _value(node.right, known)
    return known[_name(node)]


def build(way: str, arguments: dict[str, Any], cache: str) -> Built:
    """Build a program in a process of its own: "fast" is opjit's, "torch" torch's."""
    before = set(Path(cache).rglob("manifest.json"))
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", BUILD, way], input=json.dumps(arguments), env={**os.environ, "OPJIT_CACHE": cache},
                          capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    made = [json.loads(path.read_text()) for path in set(Path(cache).rglob("manifest.json")) - before]
    headers = [each["built_with"]["headers"] for each in made if "headers" in each.get("built_with", {})]
    return Built(seconds, headers[0] if headers else way, _last_line(done.stderr) if done.returncode else "")


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line]  # the compiler's come before Python's
    return (errors or lines[-1:] or [""])[0][:100]


def row(name: str, arguments: dict[str, Any], fast_only: bool, cache: str) -> tuple[str, Built]:
    """A line of the table, and opjit's build. A program that torch cannot build either says so."""
    fast = build("fast", arguments, cache)
    if fast_only:
        return f"{name:40} {fast.seconds:6.1f} {'-':>6}  {fast.problem or fast.way}", fast
    with tempfile.TemporaryDirectory() as own:
        slow = build("torch", arguments, own)
    said = fast.way if not fast.problem else f"fails with torch too: {slow.problem}" if slow.problem else f"only torch: {fast.problem}"
    return f"{name:40} {fast.seconds:6.1f} {slow.seconds:6.1f}  {said}", fast


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--sample", type=int, help="Build this many, chosen at random but each time alike.")
@click.option("--fast-only", is_flag=True, help="Leave torch's own builds out.")
def main(folder: Path, sample: int | None, fast_only: bool) -> None:
    """Build the programs of FOLDER both ways."""
    found = [(path.name, each) for path in sorted(folder.rglob("*.py")) for each in programs(path.read_text())]
    if sample is not None:
        found = random.Random(7).sample(found, min(sample, len(found)))
    click.echo(f"{'program':40} {'opjit':>6} {'torch':>6}")
    made = []
    with tempfile.TemporaryDirectory() as cache:
        for name, arguments in found:
            line, fast = row(name, arguments, fast_only, cache)
            made.append(fast)
            click.echo(line)
    good = [each for each in made if not each.problem]
    light = [each.seconds for each in good if each.way.startswith("light headers")]
    if light:
        click.echo(f"{len(light)} of the {len(good)} programs that build take the light headers, in {statistics.median(light):.1f} s "
                   "(median)")


if __name__ == "__main__":
    main()
