"""The machine of a test: users, permissions and filesystems."""

import grp
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.helpers.programs import ROOT

SOMEBODY = 12345  # a user id that nobody has
UNREADABLE = "/proc/self/mem"  # a file; reading it is an error, for root too


def copy_package(to: Path) -> Path:
    """opjit, its C headers and its templates, in another place."""
    for name in ("opjit", "kernels_c", "templates"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    return to


def open_to_group(path: Path) -> None:
    """Let a group that is not this user's own write a file or a folder."""
    if os.geteuid() == 0:
        os.chown(path, -1, SOMEBODY)
    elif grp.getgrgid(path.stat().st_gid).gr_name == pwd.getpwuid(os.geteuid()).pw_name:
        pytest.skip("this user's group is his own")
    path.chmod(path.stat().st_mode | 0o020)


no_exec = pytest.mark.no_qemu("qemu reads code, so a filesystem without execution does not stop it")
as_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can mount, or give a file to another user"
)


@contextmanager
def mounted(where: Path, *options: str) -> Iterator[None]:
    """Something mounted at a folder; a skip where that is not allowed."""
    done = subprocess.run(
        ["mount", *options, str(where)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"this machine does not allow mounts: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(where)], check=True)


def tmpfs(where: Path, options: str) -> AbstractContextManager[None]:
    """A filesystem in memory, this user's alone, mounted at a folder. Options are mount's: ``"size=60k"``, ``"size=200m,noexec"``."""
    return mounted(where, "-t", "tmpfs", "-o", f"mode=700,{options}", "none")
