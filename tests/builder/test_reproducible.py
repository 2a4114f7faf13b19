"""The same inputs make the same bytes: in any folder, from any place, under any settings."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import helpers
from tests.helpers import built, cuda_target, write_op

CODE = """\
import hashlib, sys
from pathlib import Path
from tests import helpers
folder, cache, arch = sys.argv[1:]
target = helpers.cuda_target(arch) if arch else None
entry = helpers.built(Path(folder), Path(cache), target)
print(entry.key, hashlib.sha256(entry.library.read_bytes()).hexdigest())
"""


def elsewhere(folder: Path, cache: Path, arch: str, changes: dict[str, str | None], cwd: Path, mask: int = 0o022) -> str:
    """Key and digest of a build in another process."""
    done = subprocess.run([sys.executable, "-c", CODE, str(folder), str(cache), arch], env=helpers.environment(changes), cwd=cwd,
                          umask=mask, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["", pytest.param("sm_90", marks=pytest.mark.nvcc)], ids=["cpu", "cuda"])
def test_another_folder_home_place_mask_and_order_of_the_environment_make_the_same_bytes(tmp_path: Path, arch: str) -> None:
    here = built(write_op(tmp_path / "plus"), tmp_path / "cache", cuda_target(arch) if arch else None)
    expected = f"{here.key} {hashlib.sha256(here.library.read_bytes()).hexdigest()}"
    for name, mask in (("a much longer name of a folder with blanks", 0o077), ("b", 0o000)):
        far = tmp_path / name
        (far / "tmp").mkdir(parents=True)
        folder = write_op(far / "deeper" / "still" / "plus")
        for path in folder.iterdir():
            os.utime(path, (1, 1))
        changes: dict[str, str | None] = {
            "HOME": str(far), "TMPDIR": str(far / "tmp"), "USER": name, "LANG": "de_DE.UTF-8", "TZ": "Asia/Tokyo", "SOURCE_DATE_EPOCH": "1",
            "COLUMNS": "40", "CFLAGS": "-O0", "LDFLAGS": "-Wl,--build-id",
        }
        assert elsewhere(folder, far / "cache", arch, changes, cwd=far, mask=mask) == expected
