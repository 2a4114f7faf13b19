"""The recorder: tools as they are, changes while they run, variables, and tools that cannot be watched."""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import opjit
from opjit import why
from opjit.errors import BuildError, CacheWarning
from opjit.recipe import reads, recorder
from opjit.shared_library import identity
from opjit.store.store import default_store
from tests import helpers

GCC = helpers.real_compiler()
VALUE = "int value(void) { return X; }\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "project"


def built(**given: object) -> Path:
    return opjit.build("watched", ["a.c"], **given)  # type: ignore[arg-type]


def value(path: Path) -> int:
    """What the library gives in a process of its own."""
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).value())"
    command = [sys.executable, "-c", code, str(path)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def wrapper(path: Path, body: str) -> None:
    """A compiler that is a program: C code, which may change ``words`` before gcc runs with them."""
    source = path.with_suffix(".c")
    source.write_text(
        "#include <stdio.h>\n#include <stdlib.h>\n#include <unistd.h>\n"
        "int main(int count, char **words) {\n"
        f"    static char more[100];\n    {body}\n"
        "    char **all = calloc(count + 2, sizeof *all);\n"
        "    for (int i = 0; i < count; i++) all[i] = words[i];\n"
        "    all[count] = *more ? more : NULL;\n"
        f'    all[0] = "{GCC}";\n    return execv("{GCC}", all);\n}}\n'
    )
    subprocess.run([GCC, str(source), "-o", str(path)], check=True)


def test_a_variable_that_a_compiler_asks_for_is_in_the_key(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper(
        project / "cc",
        'if (getenv("MY_SETTING")) snprintf(more, sizeof more, "-DX=%s", getenv("MY_SETTING"));',
    )
    monkeypatch.setenv("CC", str(project / "cc"))
    Path("a.c").write_text(VALUE)
    values = []
    for setting in ("1", "2", "1"):
        monkeypatch.setenv("MY_SETTING", setting)
        values.append(value(built()))
    assert values == [1, 2, 1]


def test_a_file_that_a_compiler_reads_for_itself_is_in_the_key(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a launcher's configuration, which decides what runs behind it."""
    wrapper(
        project / "cc",
        f'FILE *file = fopen("{project}/setting", "r"); char text[9] = "";\n'
        '    if (file && fgets(text, 9, file)) snprintf(more, sizeof more, "-DX=%s", text);',
    )
    monkeypatch.setenv("CC", str(project / "cc"))
    Path("a.c").write_text("#ifndef X\n#define X 0\n#endif\n" + VALUE)
    assert value(built()) == 0
    Path("setting").write_text("1")
    assert value(built()) == 1
    Path("setting").write_text("2")
    assert value(built()) == 2


def test_a_program_behind_a_wrapper_is_compared(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = project / "behind"
    (project / "cc").write_text(f'#!/bin/sh\nexec {behind} "$@"\n')
    (project / "cc").chmod(0o755)
    monkeypatch.setenv("CC", str(project / "cc"))
    Path("a.c").write_text(VALUE)
    wrapper(behind, 'snprintf(more, sizeof more, "-DX=1");')
    first = built()
    assert value(first) == 1
    assert built() == first
    wrapper(project / "next", 'snprintf(more, sizeof more, "-DX=2");')
    (project / "next").rename(behind)
    assert value(built()) == 2


def test_a_nearer_program_on_path_is_seen(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near = project / "bin"
    near.mkdir()
    monkeypatch.setenv("PATH", f"{near}:{os.environ['PATH']}")
    script = project / "cc"
    script.write_text('#!/bin/sh\nexec gcc "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    Path("a.c").write_text("#ifndef X\n#define X 0\n#endif\n" + VALUE)
    assert value(built()) == 0
    wrapper(near / "gcc", 'snprintf(more, sizeof more, "-DX=1");')
    assert value(built()) == 1


CHANGES = {
    "a link to a folder": "ln -sfn two current",
    "a header": "printf '#define X 2\\n' > one/x.h",
    "a header in an earlier folder": "printf '#define X 2\\n' > early/x.h",
    "a folder": "mv one gone && mv two one",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_while_a_compiler_runs_is_not_published_under_the_name_of_another_text(
    project: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The change comes after the compiler has read the header, and before its end."""
    for number, name in enumerate(("one", "two"), 1):
        (project / name).mkdir()
        (project / name / "x.h").write_text(f"#define X {number}\n")
    (project / "early").mkdir()
    (project / "current").symlink_to("one")
    (project / "change").write_text(f"touch done; {change}\n")  # by another program
    script = project / "cc"
    script.write_text(
        f'#!/bin/sh\n{GCC} "$@" || exit\n'
        f'case "$*" in *a.c*) cd {project}; [ -e done ] || env -u LD_PRELOAD sh change ;; esac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    Path("a.c").write_text("#include <x.h>\n" + VALUE)
    folders = ["early", "current" if "ln" in change else "one"]
    assert value(built(include=folders)) == 2
    assert value(built(include=folders)) == 2


def test_a_file_that_never_rests_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = project / "cc"
    script.write_text(
        f'#!/bin/sh\n{GCC} "$@" || exit\n'
        f'case "$*" in *a.c*) env -u LD_PRELOAD sh {project}/change ;; esac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    Path("change").write_text(f"echo >> {project}/x.h\n")  # by another program
    Path("x.h").write_text("#define X 1\n")
    Path("a.c").write_text('#include "x.h"\n' + VALUE)
    with pytest.raises(BuildError, match=r"sources changed during compilation.*x\.h"):
        built()


def test_a_compiler_that_cannot_be_watched_is_not_cached_and_why_says_so(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = project / "cc"
    script.write_text(f'#!/bin/sh\nexec env -u LD_PRELOAD {GCC} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    Path("a.c").write_text("#define X 1\n" + VALUE)
    for expected in (1, 1):
        with pytest.warns(CacheWarning, match=r"a\.c cannot be watched"):
            path = built()
        assert ctypes.CDLL(str(path)).value() == expected
    given: dict[str, list[str]] = {"cflags": [], "cuda_cflags": [], "ldflags": []}
    store = default_store()
    library = identity.describe("watched", ["a.c"], {}, given, [], None, [], store.notes)
    assert "cannot be watched" in why.compare(library, store).reason


def test_a_preloaded_library_of_the_user_stays_in_force(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("own.c").write_text(
        "#include <fcntl.h>\n#include <unistd.h>\n"
        f'__attribute__((constructor)) static void start(void) {{ close(creat("{project}/loaded", 0600)); }}\n'
    )
    own = project / "own.so"
    subprocess.run([GCC, "-shared", "-fPIC", "own.c", "-o", own], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(own))
    Path("a.c").write_text("#define X 1\n" + VALUE)
    first = built()
    assert (project / "loaded").exists()
    assert built() == first


def test_the_signature_of_a_file_system_without_times_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.h"
    path.touch()
    assert reads.signature(str(path)) is not None
    plain = os.stat
    monkeypatch.setattr(os, "stat", lambda *given: os.stat_result((*plain(*given)[:7], 0, 0, 0)))
    assert reads.signature(str(path)) is None


def test_no_compiler_outlives_a_program_that_is_killed(project: Path) -> None:
    script = project / "cc"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *a.c*) echo $$ > {project}/running; sleep 60 ;; esac\n'
        f'exec {GCC} "$@"\n'
    )
    script.chmod(0o755)
    Path("a.c").write_text("#define X 1\n" + VALUE)
    code = "import opjit; opjit.build('watched', ['a.c'])"
    for number in (signal.SIGKILL, signal.SIGTERM):
        program = subprocess.Popen(
            [sys.executable, "-c", code], env={**os.environ, "CC": str(script)}
        )
        helpers.until(
            lambda: Path("running").exists() and bool(Path("running").read_text().strip())
        )
        compiler = int(Path("running").read_text())
        Path("running").unlink()
        program.send_signal(number)
        program.wait()
        helpers.until(lambda pid=compiler: not helpers.is_alive(pid))  # type: ignore[misc]


def test_a_damaged_recorder_is_compiled_again(project: Path) -> None:
    Path("a.c").write_text("#define X 1\n" + VALUE)
    notes = default_store().notes
    assert notes is not None
    recorder.start(notes)
    code = "import opjit; opjit.build('watched', ['a.c'])"
    subprocess.run([sys.executable, "-c", code], check=True)
    (kept,) = notes.glob("record-*.so")
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-1] + b"?")
    Path("a.c").write_text("#define X 2\n" + VALUE)
    subprocess.run([sys.executable, "-c", code], check=True)
    assert kept.read_bytes() == whole


def test_a_note_of_signatures_is_for_reads_with_the_same_absences(tmp_path: Path) -> None:
    header = tmp_path / "a.h"
    header.write_text("")
    (tmp_path / "inc").mkdir()
    (tmp_path / "inc" / "b.h").write_text("")
    for path in (header, tmp_path / "inc"):
        os.utime(path, (0, 0))
    digests = {str(header): reads.Moment().digest(str(header))}
    absent = str(tmp_path / "inc" / "x.h")
    note = tmp_path / "note"
    reads.remember(reads.Reads(digests, [absent]), reads.EVERYWHERE, note, 2**62)
    other = reads.Reads(digests, [str(tmp_path / "inc" / "b.h"), absent])
    assert len([*reads.differences(other, reads.Moment(), note)]) == 1
