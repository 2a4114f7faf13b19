"""Watch the tools of a build: the files, directories and variables that they ask for.

Nothing here knows how a preprocessor, an assembler or a linker searches. A C library in LD_PRELOAD, `kernels_c/opjit_record.c`, writes down
each question that a tool and its children ask of the system, with its answer. It is compiled once per cache.
"""

import os
import platform
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from opjit import files, processes, resources
from opjit.errors import DeclarationError

LOG = "reads.log"  # the file with the records of the tools that ran in a folder
_VARIABLE = "TOOL_RECORD"  # names the file for the recorder
_FLAGS = ("-O0", "-w", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden")
_UNLISTABLE = r"[\s:$]"  # in LD_PRELOAD
_UNLOADABLE = re.compile(r"^ERROR: ld\.so: object '.*\n", re.MULTILINE)
# Variables that every process has, or that do not change what a tool makes.
PASSED = re.compile(
    r"PATH|HOME|PWD|OLDPWD|SHLVL|_|USER|LOGNAME|SHELL|TMPDIR|TMP|TEMP|LC_ALL|LD_LIBRARY_PATH|LD_PRELOAD|OPJIT_\w+|TOOL_RECORD|"
    r"(?:S?CCACHE|DISTCC|ICECC)_\w+|NINJA_STATUS"
)
_LINKER = r"(?:.*-)?(?:ld(?:\.\w+)?|lld|gold|mold)"
_MISSING = ("2", "20")  # ENOENT, ENOTDIR
_lock = processes.Lock()
_library = (
    ""  # the recorder of this process; empty before `start`, or if no tool here can be watched
)
_notes: Path | None = None  # the folder of notes that `start` got
_digests: dict[str, list[str]] = {}  # of programs: a signature and a digest by path
_DIGESTS = "programs"  # the note of them


def start(notes: Path | None) -> None:
    """Have all tools from now on watched. `notes` is the folder of a cache in which the recorder is kept."""
    global _library, _notes
    with _lock:
        _notes = notes
        if not os.path.exists(_library):
            _library = _kept(notes) or _compiled(notes)


def watching(log: Path) -> dict[str, str]:
    """Return the variables with which a tool and its children are recorded in a file."""
    if not _library:
        return {}
    others = os.environ.get("LD_PRELOAD", "")
    return {"LD_PRELOAD": f"{_library}:{others}".rstrip(":"), _VARIABLE: str(log)}


def refuse_endless(logs: Iterable[Path]) -> None:
    """Raise DeclarationError if a tool wanted to read a pipe or a device as a file."""
    refused = read(logs).refused
    if refused:
        raise DeclarationError(
            f"{refused} is a pipe or a device, and the compiler reads it as a file; put a file there, "
            "or remove the #include or the flag that names it"
        )


def without_complaints(output: str) -> str:
    """Return a tool's output without the dynamic loader's, which cannot load the recorder into programs of another libc."""
    return _UNLOADABLE.sub("", output)


def digest_of_program(path: str, signature: str) -> str:
    """Return the digest of a program or a library with a signature. A cache keeps it, because a compiler has 30 MB."""
    with _lock:
        note = _notes and _notes / _DIGESTS
        if not _digests:
            kept = files.read_checked(note)
            _digests.update(kept if isinstance(kept, dict) else {})
        known = _digests.get(path)
        if known is None or known[0] != signature:
            _digests[path] = known = [signature, files.digest(path)]
            files.write_checked(note, _digests)
        return known[1]


def _source() -> Path:
    return resources.folder("kernels_c") / "opjit_record.c"


def _name() -> str:
    made_for = f"{platform.machine()} {os.confstr('CS_GNU_LIBC_VERSION')} "
    return f"record-{files.sha256(made_for.encode() + _source().read_bytes())[:16]}.so"


def _kept(notes: Path | None) -> str:
    """Return the recorder in a cache, if it is there and unchanged."""
    if notes is None or re.search(_UNLISTABLE, str(notes)):
        return ""
    place = notes / _name()
    with suppress(OSError):
        whole = files.read_checked(place.with_suffix(".json")) == files.digest(str(place))
        if whole and os.access(place, os.X_OK):  # a file system may refuse programs
            return str(place)
    return ""


def _compiled(notes: Path | None) -> str:
    """Compile the recorder, and return its path; an empty text if no compiler here succeeds."""
    chosen = [word for name in ("CC", "CXX") for word in os.environ.get(name, "").split()[-1:]]
    found = filter(None, map(shutil.which, [*chosen, "gcc", "cc", "clang", "c++"]))
    names = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH")
    plain = {name: os.environ[name] for name in names if name in os.environ}
    with files.scratch_folder() as folder:
        library = folder / _name()
        for compiler in dict.fromkeys(found):
            command = [compiler, "-x", "c", *_FLAGS, str(_source()), "-o", str(library), "-ldl"]
            with suppress(OSError):
                processes.run_printing(command, env=plain)
            own = _of_process(library)
            if own and _works(own, folder / LOG):
                return _keep(library, notes) or own
    return ""


def _of_process(library: Path) -> str:
    """Copy the recorder for this process alone; an empty text if there is none, or no folder for it."""
    parent = "/tmp" if re.search(_UNLISTABLE, str(library)) else None  # LD_PRELOAD has no quotes
    with suppress(OSError):
        return str(shutil.copy(library, files.temporary_folder(parent=parent)))
    return ""


def _works(library: str, log: Path) -> bool:
    watched = {**os.environ, "LD_PRELOAD": library, _VARIABLE: str(log)}
    processes.run_printing(["/bin/sh", "-c", ":"], env=watched)
    return log.exists() and log.stat().st_size > 0


def _keep(library: Path, notes: Path | None) -> str:
    """Put the recorder into a cache, and return its path there; an empty text if that fails."""
    if notes is None:
        return ""
    content = library.read_bytes()
    place = notes / library.name
    with suppress(OSError):
        files.make_private(notes)
        files.write_whole(place, content, synced=False)
        place.chmod(0o755)
        files.write_checked(place.with_suffix(".json"), files.sha256(content))
    return _kept(notes)


@dataclass
class Record:
    """The questions of tools. Paths are absolute, as the tools named them."""

    opened: dict[str, str] = field(default_factory=dict)  # signatures; empty of what is no file
    folders: set[str] = field(default_factory=set)  # opened as a file, which a folder is not
    examined: set[str] = field(default_factory=set)  # existing paths
    listed: set[str] = field(default_factory=set)  # folders that were listed
    missing: set[str] = field(default_factory=set)
    programs: dict[str, str] = field(default_factory=dict)  # signatures, with shared libraries
    executed: set[str] = field(default_factory=set)  # names of programs that PATH has to find
    written: set[str] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)
    openers: dict[str, set[str]] = field(default_factory=dict)  # programs by file
    dated: set[str] = field(default_factory=set)  # opened by programs that asked for the date
    refused: str = ""  # a pipe or a device
    relative: set[str] = field(default_factory=set)  # named from the working folder
    tried: set[str] = field(default_factory=set)  # the same, by linkers, which look there in vain
    unsteady: str = ""  # a file that was another one at its second opening


def read(logs: Iterable[Path], work: str = "") -> Record:
    """Return the record in some files. Tools that run in a folder `work` may name it behind links."""
    record = Record()
    real = os.path.realpath(work) if work else ""
    texts = (os.fsdecode(log.read_bytes()) for log in logs if log.is_file())
    for text in texts:
        _enter(record, text.replace(f"\t{real}/", f"\t{work}/") if real != work else text)
    record.missing -= record.written
    record.programs.pop(_library, None)
    record.opened.pop(_library, None)
    record.examined.discard(_library)
    return record


def _enter(record: Record, text: str) -> None:
    running: dict[str, str] = {}  # programs by the id of their process
    names: dict[str, str] = {}  # without their folders
    opened_by = defaultdict[str, set[str]](set)
    dated = set[str]()
    for entry in text.split("\0")[:-1]:
        process, written, failed, signature, path = entry.split("\t", 4)
        kind = written.lower()
        if kind != written:
            is_linker = re.fullmatch(_LINKER, names.get(process, "")) is not None
            (record.tried if is_linker and failed != "0" else record.relative).add(path)
        if kind == "v":
            if not PASSED.fullmatch(path):
                record.variables.add(path)
        elif kind == "x":
            running[process] = path
            names[process] = path.rpartition("/")[2]
            opened_by.pop(process, None)  # of the program that became this one
            dated.discard(process)
            record.programs[path] = signature
        elif kind == "s":
            record.programs[path] = signature
        elif kind == "e":
            record.executed.add(path)
        elif kind == "w" and failed == "0":
            record.written.add(path)
        elif kind == "t":
            dated.add(process)
        elif kind == "p":
            record.refused = path
        elif failed != "0":
            if failed in _MISSING or not os.path.lexists(path):
                record.missing.add(path)
        elif kind == "d":
            record.listed.add(path)
        elif kind == "l":
            record.examined.add(path)
        elif signature == "dir":
            record.folders.add(path)
        else:
            if record.opened.setdefault(path, signature) != signature:
                record.unsteady = path
            opened_by[process].add(path)
            record.openers.setdefault(path, set()).add(running.get(process, ""))
    for process in dated:
        record.dated |= opened_by[process]
