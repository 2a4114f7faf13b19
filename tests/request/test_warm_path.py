"""The warm path, by tracing: an import and a hit start no process, take no lock, write nothing, and import nothing heavy."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import helpers
from tests.helpers import as_root, fresh, mounted, write_op
from tests.tracing import traced


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An op, and a cache that holds it and allreduce."""
    folder = tmp_path_factory.mktemp("warm")
    op = write_op(folder / "plus")
    code = helpers.declare(op) + "opjit.get('keytest::plus', 'cpu'); opjit.get('allreduce', 'cpu')"
    fresh(code, {"OPJIT_CACHE": str(folder / "cache")})
    time.sleep(2.1)  # the first request after that notes the signatures of new files
    fresh(code, {"OPJIT_CACHE": str(folder / "cache")})
    return op, folder / "cache"


def test_the_trace_sees_what_it_looks_for(tmp_path: Path) -> None:
    """The other tests prove nothing if it does not: a cold get does all that they forbid."""
    found = traced(
        "import opjit\ntracing.append(1)\nopjit.get('allreduce', 'cpu')\nreport()",
        {"OPJIT_CACHE": str(tmp_path / "cache")},
    )
    kinds = {line.split()[0] for line in found["seen"]}
    assert {"open", "subprocess.Popen", "os.mkdir", "os.rename", "fcntl.flock"} <= kinds
    assert {"opjit.builder.build", "opjit.builder.torch_builder"} <= set(found["heavy"])


@pytest.mark.torch
def test_an_import_writes_nothing_starts_nothing_and_imports_nothing_heavy(tmp_path: Path) -> None:
    found = traced(
        "tracing.append(1)\nimport opjit\nreport()",
        {"OPJIT_CACHE": str(tmp_path / "cache"), "HOME": str(tmp_path)},
    )
    assert (found["seen"], found["heavy"]) == ([], [])
    package = [str(helpers.ROOT / name) for name in ("opjit", "kernels_c", "templates")]
    outside = [
        path
        for path in found["reads"]
        if not path.startswith(tuple(package)) and not path.endswith((".py", ".pyc", ".so"))
    ]
    assert outside == []
    assert not any(path.endswith((".c", ".h", ".cu", ".in")) for path in found["reads"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.torch
def test_a_warm_get_writes_nothing_starts_nothing_locks_nothing_and_imports_nothing_heavy(
    warm: tuple[Path, Path],
) -> None:
    """It reads only the op's inputs, its entry and a note."""
    before = helpers.snapshot(warm[1])
    code = "tracing.append(1)\nimport opjit\nopjit.get('allreduce', 'cpu')\nreport(sum=torch.ops.opjit.allreduce(torch.ones(3)).item())"
    found = traced(code, {"OPJIT_CACHE": str(warm[1])})
    assert (found["seen"], found["heavy"], found["sum"]) == ([], [], 3.0)
    assert helpers.snapshot(warm[1]) == before
    allowed = (
        str(warm[1]),
        str(helpers.ROOT / "kernels_c"),
        str(helpers.ROOT / "templates"),
        str(helpers.ROOT / "opjit"),
        "/proc/cpuinfo",
    )
    assert [
        path
        for path in found["reads"]
        if not path.startswith(allowed) and not path.endswith((".py", ".pyc"))
    ] == []


@pytest.mark.parametrize("users", [False, True])
def test_a_warm_first_dispatch_and_a_get_of_a_user_s_op_do_as_little(
    warm: tuple[Path, Path], users: bool
) -> None:
    code = (
        helpers.declare(warm[0])
        + "tracing.append(1)\nsum = opjit.get('keytest::plus', 'cpu')(torch.ones(1)).item()"
        if users
        else "import opjit\nx = torch.ones(2)\ntracing.append(1)\nsum = torch.ops.opjit.allreduce(x).item()"
    )
    found = traced(f"{code}\nreport(sum=sum)", {"OPJIT_CACHE": str(warm[1])})
    assert (found["seen"], found["heavy"], found["sum"]) == ([], [], 2.0)


def test_a_repeated_get_touches_nothing(warm: tuple[Path, Path]) -> None:
    found = traced(
        "import opjit\nfirst = opjit.get('allreduce', 'cpu')\n"
        "everything = []\nsys.addaudithook(lambda event, arguments: everything.append(event) if tracing else None)\n"
        "tracing.append(1)\nsame = all([opjit.get('allreduce', 'cpu') is first for _ in range(100)])\n"
        "tracing.clear()\nreport(same=same, events=everything)",
        {"OPJIT_CACHE": str(warm[1])},
    )
    assert (found["same"], found["events"], found["seen"]) == (True, [], [])


def test_a_hit_needs_no_compiler_no_ninja_and_no_home(
    warm: tuple[Path, Path], tmp_path: Path
) -> None:
    code = (
        helpers.declare(warm[0])
        + "warnings.simplefilter('error')\nprint(opjit.get('keytest::plus', 'cpu')(torch.ones(1)).tolist())"
    )
    before = helpers.snapshot(warm[1])
    changes = {
        **helpers.no_compiler(tmp_path),
        "OPJIT_CACHE": str(warm[1]),
        "HOME": None,
        "OPJIT_OFFLINE": "1",
    }
    assert fresh(code, changes).stdout == "[2.0]\n"
    assert fresh(code, {**changes, "CC": "no-such"}).stdout == "[2.0]\n"
    broken = helpers.program(tmp_path / "broken-cc", "#!/bin/sh\necho not a compiler\nexit 1\n")
    assert fresh(code, {**changes, "CC": str(broken)}).stdout == "[2.0]\n"
    assert helpers.snapshot(warm[1]) == before


@pytest.mark.torch
@pytest.mark.parametrize(
    "call",
    [
        "torch.ops.keytest.plus(torch.ones(2)) + opjit.get('keytest::plus', 'cpu')(torch.ones(2))",
        "torch.compile(lambda x: torch.ops.keytest.plus(x) * 2, fullgraph=True, backend='aot_eager')(torch.ones(2))",
    ],
)
def test_the_first_call_through_torch_also_under_compile_and_in_inference_mode_builds(
    tmp_path: Path, call: str
) -> None:
    code = (
        helpers.declare(write_op(tmp_path / "plus"))
        + f"with torch.inference_mode():\n    print(({call}).tolist())"
    )
    assert fresh(code, {"OPJIT_CACHE": str(tmp_path / "cache")}).stdout == "[4.0, 4.0]\n"
    assert len(helpers.entries(tmp_path / "cache")) == 1


@pytest.mark.torch
def test_torch_itself_is_the_only_package_that_an_import_needs(warm: tuple[Path, Path]) -> None:
    """Where the build tools were never installed, a hit still works."""
    hide = "import sys\nfor name in ('filelock', 'ninja', 'rich', 'click', 'setuptools', 'jinja2'): sys.modules[name] = None\n"
    if fresh(hide + "try: import torch\nexcept ImportError: print('no')").stdout:
        pytest.skip("this torch needs one of them to be imported")
    code = (
        hide
        + helpers.declare(warm[0])
        + "print(opjit.get('keytest::plus', 'cpu')(torch.ones(1)).tolist())"
    )
    assert fresh(code, {"OPJIT_CACHE": str(warm[1])}).stdout == "[2.0]\n"


def test_an_op_declared_anew_is_got_anew(tmp_path: Path) -> None:
    op = write_op(tmp_path / "plus")
    code = (
        helpers.declare(op)
        + f"""
first = opjit.get('keytest::plus', 'cpu')
Path({str(op / "amount.h")!r}).write_text('#define AMOUNT 9.0f')
registry.declare_folder(Path({str(op)!r}))
print(opjit.get('keytest::plus', 'cpu')(torch.ones(1)).tolist(), torch.ops.keytest.plus(torch.ones(1)).tolist())
"""
    )
    assert fresh(code, {"OPJIT_CACHE": str(tmp_path / "cache")}).stdout == "[10.0] [10.0]\n"


WRITES = (
    "creat",
    "mkdir",
    "mkdirat",
    "rename",
    "renameat",
    "renameat2",
    "unlink",
    "unlinkat",
    "rmdir",
    "link",
    "linkat",
    "symlink",
    "symlinkat",
    "truncate",
    "ftruncate",
    "fallocate",
    "chmod",
    "fchmod",
    "fchmodat",
    "chown",
    "fchown",
    "lchown",
    "fchownat",
    "utime",
    "utimes",
    "utimensat",
    "futimesat",
    "mknod",
    "mknodat",
    "flock",
    "fsync",
    "setxattr",
    "fsetxattr",
    "write",
    "pwrite64",
    "writev",
)


@pytest.mark.slow
@as_root
@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace")
def test_a_hit_in_a_read_only_cache_makes_no_system_call_that_writes(
    op: Path, here: Path, tmp_path: Path
) -> None:
    get = (
        "os.path.exists('/begins')\nplus = opjit.get('keytest::plus', 'cpu')\nos.path.exists('/ends')\n"
        "print(plus(torch.ones(1)).tolist())\n"
    )
    code = "import os\n" + helpers.declare(op) + get
    trace = tmp_path / "trace"

    def traced() -> list[str]:
        """What was written or locked between the two marks."""
        done = subprocess.run(
            ["strace", "-f", "-qq", "-o", str(trace), sys.executable, "-c", code],
            check=False,
            capture_output=True,
            text=True,
            env=helpers.environment({"PYTHONDONTWRITEBYTECODE": "1", "HOME": "/nonexistent"}),
        )
        if "ptrace" in done.stderr:
            pytest.skip(f"strace may not trace here: {done.stderr.strip()[:100]}")
        assert done.stdout == "[2.0]\n", done.stderr
        calls = (
            trace.read_text(errors="replace")
            .split("/begins", 1)[1]
            .split("/ends", 1)[0]
            .splitlines()[1:-1]
        )
        assert any("manifest.json" in call for call in calls)
        writes = re.compile(rf"\d+ +({'|'.join(WRITES)})\(|.*O_(WRONLY|RDWR|CREAT|TRUNC)")
        return [call for call in calls if writes.match(call)]

    assert any("flock" in call for call in traced()), "the trace sees nothing: this was a miss"
    with mounted(here, "--bind", str(here)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(here)], check=True)
        before = helpers.snapshot(here), helpers.snapshot(tmp_path / "tmp")
        assert traced() == []
        assert (helpers.snapshot(here), helpers.snapshot(tmp_path / "tmp")) == before
