"""A fresh process of inputs.py: print the seconds of CPU of each request as JSON."""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import opjit
from opjit import request
from opjit.backends import for_device
from opjit.backends.targets import here

try:
    from opjit.catalog import registry
except ImportError:  # an older checkout
    from opjit.declare import registry  # type: ignore[attr-defined, no-redef]

HEADERS = 374
REPEATED = 40
CODE = "opjit_status {0}_cpu(const opjit_tensor *x, opjit_tensor *out)\n{{ OPJIT_FAIL({1}); }}"


def cpu() -> float:
    """Seconds of this process and of the compilers that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def least(call: Callable[[], object]) -> float:
    """The least CPU time of a call."""
    spent = []
    for _ in range(REPEATED):
        start = time.process_time()
        call()
        spent.append(time.process_time() - start)
    return min(spent)


def project(folder: Path) -> Path:
    """Write a source with its headers, once, and return it."""
    source = folder / "many.c"
    if not source.exists():
        includes = "".join(f'#include "many/{number}.h"\n' for number in range(HEADERS))
        (folder / "many").mkdir()
        for number in range(HEADERS):
            (folder / f"many/{number}.h").write_text(f"int many{number}(void);\n")
        source.write_text(includes + "int many(void) { return 1; }\n")
    return source


def next_op() -> float:
    spent = []
    for _ in range(5):
        name = f"next{os.urandom(4).hex()}"
        start = cpu()
        op = opjit.inline(f"inputs::{name}(Tensor x) -> Tensor", c=CODE.format(name, f'"{name}"'))
        opjit.get(f"inputs::{name}", "cpu")
        spent.append(cpu() - start)
        assert op is not None
    return min(spent)


def main() -> None:
    source = project(Path(sys.argv[1]))
    op = registry.find("allreduce")
    target = here(for_device("cpu"))
    built = request.entry(op, target)
    library = opjit.build("many", [source])
    assert opjit.build("many", [source]) == library
    found = {
        "warm get": least(lambda: request.entry(op, target)),
        "374 headers": least(lambda: opjit.build("many", [source])),
        "the next C op": next_op(),
    }
    assert request.entry(op, target).key == built.key
    print(json.dumps(found))


main()
