"""The store: one folder per binary, named by its key, which appears complete by a single rename and
never changes; see FORMAT.md.

Readers do not lock or write anything. If an entry cannot be read or trusted, it is a miss. If other
users could replace the root or a folder below it, every entry is a miss.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from opjit import files, progress
from opjit.backends.targets import Target
from opjit.errors import EntryError, UntrustedFolder, warn_of_cache
from opjit.store import manifest as manifests
from opjit.store.entry import Entry, NotWanted, verify
from opjit.store.manifest import Manifest

if TYPE_CHECKING:
    from opjit.store.bundle import Bundle  # a warm path imports no bundles

VERSION = "v2"  # the folder of all other folders; its number changes with the layout of the folders
PARTS = "parts"  # the maker, and the folder, of files that several builds use
SHARED = "shared"  # the folder of parts that travel, inside the folder of parts
UNCACHED = (
    "uncached-"  # the start of the names of notes on requests for binaries that are not cached
)
SEEN = "seen"  # the folder of signatures of the files that builds read
TUNED = "tuned"  # the folder of choices among variants
TREES = "trees"  # the folder of the copies of other compilers' caches
# Folders that hold no entries.
SPECIAL = frozenset({"staging", "toolchain", PARTS, "logs", SEEN, TREES, TUNED})
KEY = re.compile(r"[0-9a-f]{64}")  # the name of an entry's folder
DAY = 24 * 3600.0  # seconds
_TRIES = 5  # to publish while other processes remove folders
_warned: set[str] = set()  # warnings given about roots that are not trusted


def default_root() -> Path:
    """Return $OPJIT_CACHE or, if it is not set, opjit/ in the user's cache folder."""
    configured = os.environ.get("OPJIT_CACHE")
    if configured:
        return _absolute(os.path.expanduser(configured))
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if home.startswith("~"):  # a user without a home directory or an account
        return files.local_folder() / "cache"
    return Path(os.path.abspath(home)) / "opjit"


@cache
def _absolute(path: str) -> Path:
    """Return the absolute form of a path; it stays when the process changes its working directory."""
    return Path(os.path.abspath(path))


class Store(NamedTuple):
    """A local store. Constructing one does not access the disk."""

    root: Path

    @property
    def base(self) -> Path:
        return self.root / VERSION

    @property
    def notes(self) -> Path | None:
        """The folder of notes on compilers.

        None if other users could replace the store, because nothing in it is then read or written.
        """
        folder = self.base / "toolchain"
        return folder if self.trusted(folder) else None

    def seen(self, key: str) -> Path | None:
        """The note with signatures of the files that the build of an entry read; None if there is no store, or where `notes` is."""
        folder = self.base / SEEN
        return folder / key if os.path.isdir(self.base) and self.trusted(folder) else None

    def uncached(self, key: str) -> str:
        """Return why the last build of a request was not cached; an empty text if it was, or if there was none."""
        note = self.notes and files.read_checked(self.notes / f"{UNCACHED}{key}")
        return str(note["reason"]) if isinstance(note, dict) else ""

    def problem(self, *folders: Path, trusted_as: Path | None = None) -> str | None:
        """Say how other users could replace the store, or the given folders in it; None if they cannot. An entry's path must keep its
        meaning from its verification to its loading, so every folder on it is checked."""
        problem = files.replacement_risk(self.root, trusted_as)
        with suppress(OSError):  # a missing folder holds nothing to load
            for folder in (self.base, *folders):
                problem = problem or files.trust_problem(folder, trusted_as)
        return problem

    def trusted(self, *folders: Path, trusted_as: Path | None = None) -> bool:
        """Return whether `problem` finds none; warns of the one it finds."""
        problem = self.problem(*folders, trusted_as=trusted_as)
        if problem is not None:
            self.warn_unused(problem)
        return problem is None

    def warn_unused(self, problem: str) -> None:
        """Warn, once per day and problem, that the store is not used."""
        text = (
            f"the cache {self.root} is not used: {problem}; or set OPJIT_CACHE (for a read-only cache, "
            "OPJIT_LAYERS) to a directory that only you can write"
        )
        if problem not in _warned:
            _warned.add(problem)
            if _is_told_today(text):
                progress.log(text)
            else:
                warn_of_cache(text)

    def _require_trusted(self, *folders: Path) -> None:
        problem = self.problem(*folders)
        if problem is not None:
            raise UntrustedFolder(problem)

    def staging(self) -> Path:
        """Return the folder of builds in progress, without day-old ones.

        Raises OSError, or UntrustedFolder if other users could replace it.
        """
        staging = self.base / "staging"
        self._require_trusted()  # before creating anything there
        files.make_private(staging)
        self._require_trusted(staging)
        with suppress(OSError):
            for leftover in os.scandir(staging):
                with suppress(OSError):
                    if time.time() - leftover.stat(follow_symlinks=False).st_mtime > DAY:
                        files.remove_tree(Path(leftover.path))
        return staging

    def stage(self) -> Path:
        """Create a private folder on the store's filesystem. Raises the errors of `staging`, and OSError if the store is not writable."""
        folder = self.staging() / files.random_name()
        folder.mkdir(mode=0o700)
        return folder

    def publish(self, staged: Path, place: Path, target: Target | None) -> Entry:
        """Publish a staged folder at `place`, unless a good entry is there. Raises OSError, or EntryError if it fails verification."""

        def is_good(there: Path) -> bool:
            with suppress(EntryError, OSError):
                verify(there, target)
                return True
            return False

        for _ in range(_TRIES):
            aside = self.base / "staging" / files.random_name()
            files.make_private(place.parent)
            self._require_trusted(place.parent.parent, place.parent)
            with suppress(FileNotFoundError):  # another process is clearing the cache
                files.put_in_place(staged, place, aside, is_good)
                # By its path, because another process may have been first.
                return verify(place, target)[0]
            if not staged.is_dir():
                break
        raise FileNotFoundError(f"{place} was removed")

    def receive(self, bundle: Bundle, place: Path, target: Target | None) -> Entry:
        """Publish an entry after its signature was checked.

        Raises OSError, or EntryError if it contradicts itself, `place` or `target`.
        """
        manifest = manifests.parse(bundle.manifest)
        staged = self.stage()
        try:
            (staged / "entry").mkdir(mode=0o700)
            files.write_synced(staged / "entry" / manifest.library, bundle.library)
            files.write_synced(staged / "entry" / manifests.NAME, bundle.manifest)
            verify(staged / "entry", target, place.name)
            return self.publish(staged / "entry", place, target)
        finally:
            files.remove_tree(staged)

    def receive_or_keep(
        self, bundle: Bundle, place: Path, target: Target | None, name: str
    ) -> Entry:
        """Publish an entry as `receive` does. If the store cannot be used, warn that `name` is kept in a folder of this process."""
        try:
            return self.receive(bundle, place, target)
        except (OSError, UntrustedFolder) as error:
            warn_of_cache(
                f"the cache cannot be written ({error}), so {name} is kept for this process only and will be built "
                "again; set OPJIT_CACHE to a directory that only you can write"
            )
        private = Store(files.temporary_folder())
        return private.receive(bundle, private.root / place.relative_to(self.root), target)


def _is_told_today(text: str) -> bool:
    """Return whether a process of this user has given a warning in the last day, and note that this one does."""
    note = files.local_folder() / f"{files.sha256(text)[:16]}.warned"
    with suppress(OSError):
        files.make_private(note.parent)
        if files.trust_problem(note.parent) is None:
            if note.exists() and time.time() - note.stat().st_mtime < DAY:
                return True
            files.write_note(note, "")
    return False


def default_store() -> Store:
    """Return the store at `default_root`: the cache of this user."""
    return Store(default_root())


def first(
    folder: Path,
    target: Target | None,
    fits: Callable[[Manifest], bool],
    warn: bool = True,
    trusted_as: Path | None = None,
) -> Entry | None:
    """Return the first verified entry with a manifest that `fits`, or None.

    `fits` may raise EntryError; `warn` is about unverified ones.
    """
    try:
        found = [each for each in os.scandir(folder) if KEY.fullmatch(each.name)]
        # The newest first: an older entry with the same request key is likely to be out of date.
        found.sort(key=lambda each: -each.stat(follow_symlinks=False).st_mtime)
    except OSError:
        return None
    for each in found:
        place = folder / each.name
        try:
            return verify(place, target, trusted_as=trusted_as, fits=fits)[0]
        except (FileNotFoundError, NotADirectoryError, NotWanted, manifests.AnotherFormat):
            pass
        except (EntryError, OSError) as error:
            if warn:
                warn_of_cache(f"the cache entry {place} is not used: {error}; opjit rebuilds it")
    return None
