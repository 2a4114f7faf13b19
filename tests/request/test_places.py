"""Requests where the cache, the temporary folder, the user's account or a source is not as usual."""

import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import opjit
from opjit import request
from opjit.backends import targets
from opjit.errors import NoKernel, OpjitError
from tests import helpers
from tests.helpers import GET, UNREADABLE, MakeOp, as_root, cache_warnings, fresh, tmpfs

NOOP = "opjit_status noop_cpu(const opjit_tensor *x) { (void)x; return OPJIT_OK; }"


@as_root
@pytest.mark.parametrize("size", [8, 60])
def test_where_everything_is_full_the_error_says_so(op: Path, tmp_path: Path, size: int) -> None:
    full = tmp_path / "full"
    full.mkdir(mode=0o700)
    with tmpfs(full, f"size={size}k"):
        (full / "tmp").mkdir()
        code = helpers.declare(op) + (
            "warnings.simplefilter('ignore')\n"
            "try: opjit.get('keytest::plus', 'cpu')\n"
            "except opjit.errors.OpjitError as error: print(str(error).splitlines()[0])\n"
        )
        done = fresh(code, {"OPJIT_CACHE": str(full / "cache"), "TMPDIR": str(full / "tmp")})
        assert "No space left on device" in done.stdout
        assert helpers.entries(full / "cache") == []


def test_a_header_that_the_compiler_does_not_read_need_not_be_readable(
    op: Path, here: Path
) -> None:
    (op / "amount.h").write_text('#define AMOUNT 1.0f\n#if 0\n#include "broken.h"\n#endif\n')
    (op / "broken.h").symlink_to(UNREADABLE)
    code = helpers.declare(op) + "warnings.simplefilter('always')\n" + GET
    for _ in range(2):
        done = fresh(code)
        assert (done.stdout, done.stderr) == ("[2.0]\n", "")
    assert len(helpers.entries(here)) == 1


@pytest.mark.slow
@as_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv")
@pytest.mark.parametrize("home", [None, "/"])
def test_a_user_without_a_name_or_a_home_gets_his_ops(
    op: Path, tmp_path: Path, home: str | None
) -> None:
    """User 54321 is not in the passwd file, and may read what he needs by a capability."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    as_nobody = (
        "setpriv",
        "--reuid=54321",
        "--regid=54321",
        "--clear-groups",
        "--inh-caps=+dac_read_search",
        "--ambient-caps=+dac_read_search",
    )
    allowed = subprocess.run(
        [*as_nobody, sys.executable, "-c", "import os"],
        check=False,
        capture_output=True,
        text=True,
        cwd="/",
    )
    if allowed.returncode != 0:
        pytest.skip(f"no other user can run this Python: {allowed.stderr.strip()[:200]}")
    code = "import os\n" + helpers.declare(op) + "warnings.simplefilter('always')\n" + GET
    changes = {
        "HOME": home,
        "OPJIT_CACHE": None,
        "XDG_CACHE_HOME": None,
        "TMPDIR": str(tmp_path / "tmp"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = fresh(code, changes, before=as_nobody, cwd=Path("/"))
    assert done.stdout == "[2.0]\n"
    own = tmp_path / "tmp" / "opjit-54321"
    assert own.stat().st_mode & 0o777 == 0o700
    if home is None:
        assert "CacheWarning" not in done.stderr
        assert len(helpers.entries(own / "cache")) == 1
    else:
        assert done.stderr.count("CacheWarning") == 1
        assert "OPJIT_CACHE" in done.stderr


@pytest.mark.slow
def test_a_cache_whose_name_the_locale_cannot_spell_is_used(op: Path, tmp_path: Path) -> None:
    changes = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = fresh(helpers.declare(op) + GET, {"OPJIT_CACHE": str(tmp_path / "é"), **changes})
    assert done.stdout == "[2.0]\n"
    assert "CacheWarning" not in done.stderr
    assert len(helpers.entries(tmp_path / "é")) == 1


def test_an_op_without_a_source_for_the_backend_names_the_file_it_looked_for(
    make_op: MakeOp,
) -> None:
    op = make_op("lonely(Tensor x) -> Tensor")
    with pytest.raises(NoKernel, match=r"has no kernel for cpu: expected lonely\.c .* in /"):
        opjit.get(op.qualified, "cpu")
    (op.folder / "lonely.cpp").touch()
    with pytest.raises(
        NoKernel,
        match=r'; lonely\.cpp is C\+\+: build it with opjit\.load\("lonely", \["/.*/lonely\.cpp"\]\)',
    ):
        opjit.get(op.qualified, "cpu")


def test_offline_mode_names_what_is_in_no_cache(
    make_op: MakeOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPJIT_OFFLINE", "1")
    op = make_op("noop(Tensor x) -> ()", NOOP)
    with pytest.raises(OpjitError, match=f"{op.qualified}.* is not cached.*OPJIT_OFFLINE"):
        opjit.get(op.qualified, "cpu")


def test_an_unusable_tmpdir_costs_the_lock_and_one_warning(
    make_op: MakeOp, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python looks in $TMPDIR, /tmp, /var/tmp, /usr/tmp and the working folder; root can write to all of them."""
    monkeypatch.setattr(
        "tempfile.gettempdir",
        Mock(side_effect=FileNotFoundError(2, "No usable temporary directory found")),
    )
    op = make_op("noop(Tensor x) -> ()", NOOP)
    with cache_warnings() as texts:
        entry = request.entry(op, targets.here(helpers.cpu()))
    assert len(set(texts)) == 1  # the entry's lock, and its parts'
    assert entry.folder.is_relative_to(here)


def test_an_op_builds_where_tmpdir_names_no_folder(op: Path, here: Path) -> None:
    code = (
        helpers.declare(op)
        + "warnings.simplefilter('error')\nprint(opjit.get('keytest::plus', 'cpu')(torch.ones(1)).tolist())"
    )
    assert fresh(code, {"TMPDIR": "/nonexistent/folder"}).stdout == "[2.0]\n"


def test_a_build_that_may_start_no_thread_names_the_limits(here: Path) -> None:
    code = """
import threading, warnings, opjit
def refuse(thread):
    raise RuntimeError("can't start new thread")
threading.Thread.start = refuse
warnings.simplefilter("ignore")  # of a build without a lock
try:
    opjit.get("allreduce", "cpu")
except opjit.errors.OpjitError as error:
    print(error)
"""
    assert fresh(code).stdout.startswith("cannot start a thread for the build; raise `ulimit -v`")
