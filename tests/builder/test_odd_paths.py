"""Folders whose paths no build file can name, and folders that this user cannot enter: an op is built, or one message says why not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from opjit.errors import BuildError
from tests.helpers import built, cache_warnings, environment, write_op

ODD = [b"new\nline", b"a\ttab", b"not UTF-8: \xff"]
# Root enters every folder, unless it gives up the right to.
_BOUND = [] if os.geteuid() else ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]


@pytest.mark.parametrize("name", ODD)
def test_a_cache_of_any_name_keeps_entries(name: bytes, tmp_path: Path) -> None:
    cache = tmp_path / os.fsdecode(name)
    with cache_warnings() as warned:
        entry = built(write_op(tmp_path / "plus"), cache)
    assert warned == []
    assert entry.library.is_relative_to(cache)


@pytest.mark.parametrize("name", ODD)
def test_an_op_in_a_folder_that_no_build_file_can_name_is_refused_by_that_name(name: bytes, tmp_path: Path) -> None:
    folder = write_op(tmp_path / os.fsdecode(name))
    with pytest.raises(BuildError, match="which no build file can name; rename the folder") as raised:
        built(folder, tmp_path / "cache")
    assert ascii(str(folder)) in str(raised.value)


@pytest.mark.parametrize(("arguments", "expected"), [
    (["get", "./closed"], "closed cannot be read (Permission denied: "),
    (["get", "./closed/op"], "closed/op cannot be read (Permission denied: "),
    (["precompile", "round_ste", "--store", "closed/store"], "closed/store cannot hold it: [Errno 13] Permission denied: "),
    (["get", "round_ste", "--device", "cpu", "--build-directory", "closed/x"], "cannot be copied to 'closed/x': [Errno 13] "),
], ids=lambda value: value[-1] if isinstance(value, list) else "")
def test_a_folder_that_cannot_be_entered_is_one_message(arguments: Sequence[str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    done = subprocess.run([*_BOUND, sys.executable, "-m", "opjit", *arguments], capture_output=True, text=True, check=False, cwd=tmp_path,
                          env=environment({"OPJIT_CACHE": str(tmp_path / "cache")}))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert expected in done.stderr
