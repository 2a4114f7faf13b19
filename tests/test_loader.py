"""Opening a library: also from a filesystem that lets no program run."""

from __future__ import annotations

from pathlib import Path

from tests import helpers
from tests.helpers import as_root, fresh, tmpfs


@as_root
def test_an_op_in_a_noexec_cache_is_an_error_that_names_the_way_out(op: Path, here: Path) -> None:
    here.mkdir(mode=0o700)
    code = helpers.declare(op) + "try: opjit.get('keytest::plus', 'cpu')\nexcept opjit.errors.LoadError as error: print(error)\n"
    with tmpfs(here, "noexec"):
        for _ in range(2):
            done = fresh(code)
            assert "noexec, set OPJIT_CACHE to a folder of your own on another one" in done.stdout
            assert done.stderr == ""
        assert len(helpers.entries(here)) == 1
