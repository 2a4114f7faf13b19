"""The store: one folder per binary, named by its key, which appears complete by a single rename and never changes.

    <root>/v1/<namespace>.<op>/<arch>/<key>/    the library, manifest.json, the glue's source, the build's commands
    <root>/v1/cpp_extension.<name>/…/<key>/     the same for a C++ extension; see extension.py
    <root>/v1/staging/<random>/                 builds under way; swept when a day old
    <root>/v1/toolchain/, stubs/, logs/         notes on compilers, what links are made against, failed builds
    <root>/v1/stats.jsonl, pruned               what processes counted, and an empty file whose date is when a build last pruned

Readers take no lock and write nothing. Whatever cannot be read or trusted is a miss. So is all there is where others could put
something else in the place of the root, or of a folder on the way to an entry.
"""

import errno
import hashlib
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from opjit import binary, files, manifest
from opjit.errors import CacheWarning, EntryError, UntrustedFolder
from opjit.manifest import Manifest
from opjit.recipe import Recipe
from opjit.targets import Target

if TYPE_CHECKING:
    from opjit.bundle import Bundle

SPECIAL = frozenset({"staging", "toolchain", "stubs", "logs"})  # folders that hold no entries
STAGING_AGE = 24 * 3600.0  # seconds
_ADVICE = "ops are built for this process only until you close it to others, or set OPJIT_CACHE to a folder of your own"
_PATIENCE = 5  # how often a folder that others remove is made again
_known: set[Path] = set()  # roots that nobody else can swap
_told: set[str] = set()  # what was said about those that somebody can


class Entry(NamedTuple):
    """A binary that was verified when this object was made.

    Attributes:
        folder: where it lies.
        key: identity of what it was built from.
        library: path of the shared library.
        seconds: that its build took; 0 where its manifest does not say.
    """

    folder: Path
    key: str
    library: Path
    seconds: float = 0.0

    def __eq__(self, other: object) -> bool:
        """What was built again is the same entry, however long that took."""
        return isinstance(other, Entry) and self[:3] == other[:3]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:3])


def default_root() -> Path:
    """$OPJIT_CACHE, else opjit/ in the user's cache folder."""
    configured = os.environ.get("OPJIT_CACHE")
    if configured:
        path = os.path.expanduser(configured)
        return Path(os.path.normpath(path)) if os.path.isabs(path) else _from_here(path)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if home.startswith("~"):  # a user without a home, and unknown to the system
        import tempfile

        return Path(tempfile.gettempdir()) / f"opjit-{os.geteuid()}" / "cache"
    return Path(os.path.abspath(home)) / "opjit"


@cache
def _from_here(path: str) -> Path:
    """A relative path, from where the process is when it first means it: it may change its folder."""
    return Path(os.path.abspath(path))


class Store(NamedTuple):
    """A local store. Making the object touches nothing."""

    root: Path

    @property
    def base(self) -> Path:
        return self.root / "v1"

    @property
    def notes(self) -> Path:
        """Folder of what is remembered about compilers."""
        return self.base / "toolchain"

    def folder(self, qualified: str, target: Target) -> Path:
        """The folder of all entries of an op for a target."""
        return self.base / qualified.replace("::", ".") / target.folder

    def find(self, recipe: Recipe, quiet: bool = False) -> Entry | None:
        """The verified entry of a recipe; None is a miss, with one warning where there was an entry that is no good.

        Where no compiler is known the key cannot be known either: then any entry that was built from the same sources,
        with the same flags, for the same target, will do, whoever compiled it.

        Args:
            quiet: do not warn; for the second look of one request.
        """
        folder = self.folder(recipe.schema.qualified, recipe.target)
        return self.look(recipe, quiet) if self.trusted(folder.parent, folder) else None

    def look(self, recipe: Recipe, quiet: bool = False) -> Entry | None:
        """As `find`, wherever the store lies: it is named by the user, or came with the op's own source."""
        folder = self.folder(recipe.schema.qualified, recipe.target)
        key = recipe.key
        if key is not None:
            found = _read(folder / key, recipe.target, quiet)
            return found[0] if found else None
        wanted = recipe.document()
        return first(folder, recipe.target, lambda known: known == {**wanted, "toolchain": known.get("toolchain")}, quiet)

    def problem(self, *folders: Path) -> str | None:
        """Who can put something else in the place of the store, or of folders in it; None if nobody can.

        Each folder on the way is looked at: between an entry's verification and the moment when it is loaded, its path must not come
        to mean something else. The way to the store is looked at once in a process.
        """
        problem = None
        if self.root not in _known:
            there = os.path.isdir(self.root)  # before the look: of what somebody makes meanwhile, nothing is known
            problem = files.swappable(self.root)
            if problem is None and there:
                _known.add(self.root)
        with suppress(OSError):  # then there is nothing to be loaded
            for folder in (self.base, *folders):
                problem = problem or files.distrusted(folder)
        return problem

    def trusted(self, *folders: Path, advice: str = _ADVICE) -> bool:
        """Whether there is no such problem; if there is one, it is said."""
        problem = self.problem(*folders)
        if problem is not None:
            self.tell(problem, advice)
        return problem is None

    def tell(self, problem: str, advice: str = _ADVICE) -> None:
        """Warn that the store is not used, once in a process."""
        if problem not in _told:
            _told.add(problem)
            warnings.warn(CacheWarning(f"the cache {self.root} is not used: {problem}; {advice}"), stacklevel=3)

    def _require_trusted(self, *folders: Path) -> None:
        problem = self.problem(*folders)
        if problem is not None:
            raise UntrustedFolder(problem)

    def stage(self) -> Path:
        """A new private folder on the store's filesystem.

        Raises:
            OSError: the store cannot be written.
            UntrustedFolder: somebody else could write there.
        """
        staging = self.base / "staging"
        self._require_trusted()  # before anything is made there
        files.make_private(staging)
        self._require_trusted(staging)
        self._sweep(staging)
        folder = staging / files.unique()
        folder.mkdir(mode=0o700)
        return folder

    def put(self, staged: Path, place: Path, described: Manifest, target: Target | None) -> Entry:
        """Put a complete folder in its place. Where another process was first, its entry is the one that counts.

        Args:
            target: as `verify` takes it.

        Raises:
            OSError: the store cannot be written.
            EntryError: what was staged does not verify.
        """
        for _ in range(_PATIENCE):
            files.make_private(place.parent)
            self._require_trusted(place.parent.parent, place.parent)
            with suppress(FileNotFoundError):  # somebody clears the cache
                return _appear(staged, place, self.base / "staging" / files.unique(), target, described.key)
            if not staged.is_dir():
                break
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(place))

    def receive(self, bundle: "Bundle", place: Path, target: Target | None) -> Entry:
        """Publish an entry that came from elsewhere. Whoever calls this has checked that it may be trusted.

        Args:
            place: the folder of the entry; its name is the key that the manifest must have.
            target: as `verify` takes it.

        Raises:
            OSError: the store cannot be written.
            EntryError: the bundle does not agree with itself, or does not fit the place or the target.
        """
        described = manifest.parse(bundle.manifest)
        staged = self.stage()
        try:
            (staged / "entry").mkdir(mode=0o700)
            files.write_synced(staged / "entry" / described.library, bundle.library)
            if target is None and not described.library.endswith(".so"):
                (staged / "entry" / described.library).chmod(0o755)  # a program
            files.write_synced(staged / "entry" / manifest.NAME, bundle.manifest)
            verify(staged / "entry", target, place.name)
            return self.put(staged / "entry", place, described, target)
        finally:
            files.remove_tree(staged)

    def entries(self) -> Iterator[Path]:
        """Folders of all entries, unverified, in order."""
        try:
            found = sorted(path.parent for path in self.base.glob(f"*/*/*/{manifest.NAME}") if path.parts[-4] not in SPECIAL)
        except OSError:  # nothing that this user could read
            return
        yield from found

    def _sweep(self, staging: Path) -> None:
        """Remove what killed builders left behind, once it is old enough to be nobody's."""
        with suppress(OSError):
            for leftover in os.scandir(staging):
                with suppress(OSError):
                    if time.time() - leftover.stat(follow_symlinks=False).st_mtime > STAGING_AGE:
                        files.remove_tree(Path(leftover.path))


def first(folder: Path, target: Target | None, fits: Callable[[dict[str, Any]], bool], quiet: bool = False,
          like: Path | None = None) -> Entry | None:
    """The first verified entry in a folder of entries whose document fits; a warning for each that is no good.

    Args:
        target, like: as `verify` takes them.
        fits: may raise EntryError: such a document is no good.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return None
    for name in names:
        found = _read(folder / name, target, quiet, like, fits)
        if found:
            return found[0]
    return None


def _read(folder: Path, target: Target | None, quiet: bool, like: Path | None = None,
          fits: Callable[[dict[str, Any]], bool] | None = None) -> tuple[Entry, Manifest] | None:
    try:
        found = verify(folder, target, like=like)
        return found if fits is None or fits(found[1].document) else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (EntryError, OSError) as error:
        if not quiet:
            warnings.warn(CacheWarning(f"the cache entry {folder} is not used: {error}; opjit rebuilds it"), stacklevel=2)
        return None


def copy(entry: Entry, target: Target, qualified: str, directory: Path) -> Entry:
    """Leave an entry's files in a folder of their own in a user's directory, which others may use too.

    Raises:
        OSError: the directory cannot be written, or the entry went away.
        EntryError: somebody else could have written what is there now.
    """
    directory.mkdir(parents=True, exist_ok=True)
    place = directory / f"{qualified.replace('::', '.')}.{target.folder}.{entry.key[:20]}"
    staged, aside = (directory / f".{files.unique()}" for _ in range(2))
    staged.mkdir(mode=0o755)
    try:
        for name in sorted(os.listdir(entry.folder), key=manifest.NAME.__eq__):  # the manifest last
            files.write_synced(staged / name, (entry.folder / name).read_bytes())
        return _appear(staged, place, aside, target, entry.key)
    finally:
        files.remove_tree(staged)
        files.remove_tree(aside)


def _appear(staged: Path, place: Path, aside: Path, target: Target | None, key: str) -> Entry:
    """Rename a complete folder to its place. Where one is there that is good, it is the one that counts; a bad one goes aside."""
    files.sync(staged)
    for _ in range(2):
        try:
            os.rename(staged, place)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        else:
            files.sync(place.parent)
            break
        with suppress(EntryError, OSError):
            return verify(place, target, key)[0]  # the winner's; ours goes with its staging folder
        with suppress(OSError):  # a bad one: out of the way, so that it does not live for ever
            os.rename(place, aside)
    return verify(place, target, key)[0]


def verify(folder: Path, target: Target | None, key: str | None = None, like: Path | None = None,
           unnoticed: bool = False) -> tuple[Entry, Manifest]:
    """Check all that must hold before a library is loaded: owners, modes, size, hash, machine, arch, what it asks for.

    Args:
        target: of an op; None for a C++ extension, which may ask for any library.
        key: of the entry; None is the folder's name.
        like: a file that whoever may write the entry's may write as well (see files.distrusted).
        unnoticed: as `read` takes it.

    Raises:
        FileNotFoundError: there is no such entry.
        EntryError, OSError: there is one, and it must not be used.
    """
    described, content = read(folder, like, unnoticed)
    if described.key != (key or folder.name):
        raise EntryError("its manifest is of another key")
    if target is not None:
        check_library(content, target, described.link)
    elif binary.machine(content) != platform.machine():
        raise EntryError(f"its binary is for {binary.machine(content)}, not {platform.machine()}")
    return Entry(folder, described.key, folder / described.library, described.seconds), described


def read(folder: Path, like: Path | None = None, unnoticed: bool = False) -> tuple[Manifest, bytes]:
    """A folder's manifest and the library that it names: nobody else can have written them, and they are of one build.

    Args:
        unnoticed: this is no use of the entry, and shall not count as one.

    Raises:
        FileNotFoundError: one of them is not there.
        EntryError, OSError: they must not be used.
    """
    _refuse_distrusted(folder, like)
    _refuse_distrusted(folder / manifest.NAME, like)
    described = manifest.parse(bounded(folder / manifest.NAME))
    library = folder / described.library
    _refuse_distrusted(library, like)
    if library.stat().st_size != described.size:
        raise EntryError("its library is not as long as its manifest says")
    with files.unread(library) if unnoticed else nullcontext():
        content = library.read_bytes()
    if hashlib.sha256(content).hexdigest() != described.sha256:
        raise EntryError("its library is not the one that its manifest names")
    return described, content


def _refuse_distrusted(path: Path, like: Path | None = None) -> None:
    problem = files.distrusted(path, like)
    if problem:
        raise EntryError(problem)


def check_library(content: bytes, target: Target, link: Iterable[str] = ()) -> None:
    """Refuse a library that does not fit the target or asks for anything an op may not need.

    Args:
        link: the flags it was linked with; what they name, it may need.
    """
    allowed = target.backend.flags(target.arch, target.runtime).needed
    machine = "aarch64" if target.arch == "aarch64" else "x86_64"
    if target.backend.uses_nvcc:
        machine = platform.machine()  # the host half of a CUDA op is built for the machine at hand
    archs = frozenset(target.arch.split("+")) if target.backend.uses_nvcc else frozenset()
    binary.check(content, machine, allowed, archs, frozenset(flag[2:] for flag in link if flag.startswith("-l")))


def bounded(path: Path) -> bytes:
    """The bytes of a manifest.

    Raises:
        OSError: it cannot be read.
        EntryError: it is larger than any.
    """
    with open(path, "rb") as file:
        content = file.read(manifest.MAX_BYTES + 1)
    if len(content) > manifest.MAX_BYTES:
        raise EntryError(f"{path.name} is larger than {manifest.MAX_BYTES} bytes")
    return content
