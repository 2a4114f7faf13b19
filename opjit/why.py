"""``opjit why``: the reason why a request hits or misses.

A miss is compared with the nearest entry of the same name, which differs in the fewest inputs.
"""

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from opjit import backends, progress
from opjit.environment import is_on
from opjit.errors import EntryError
from opjit.recipe.build_inputs import BuildInputs
from opjit.store import layers
from opjit.store.entry import read, verify
from opjit.store.layers import Location
from opjit.store.manifest import Manifest
from opjit.store.store import Store

_MOST_CANDIDATES = 200  # entries to compare with, the newest of an op and target
_MOST_SHOWN = 12  # differences in a text
_FLAGS = {
    "c": "flag",
    "cuda": "nvcc flag",
    "device": "device compiler's flag",
    "link": "linker flag",
    "stubs": "library of torch's",
    "sources": "extra source",
}
# Names of other parts of a document; the rest go by their names in the document.
_NAMES = {
    "cc.version": "compiler",
    "cc.machine": "compiler's target",
    "cc.programs": "compiler's programs",
    "nvcc.build": "nvcc",
    "nvrtc.version": "NVRTC",
    "device.version": "device compiler",
    "device.sha256": "device compiler's file",
    "cxx.version": "C++ compiler",
    "cxx.machine": "C++ compiler's target",
    "cxx.programs": "C++ compiler's programs",
    "dispatch_key": "dispatch key",
    "kernel": "source's name",
    "debug": "debug build",
}
# Parts of a document that have rules of their own, or that a request does not know.
_COMPARED_APART = {"known", "inputs", "absent", "flags", "toolchain", "glue"}
# The kinds of differences, the most frequent first; all remaining kinds come last.
_LIKELY = (
    "source",
    "header",
    "library",
    "schema",
    *_FLAGS.values(),
    "compiler",
    "compiler's target",
    "nvcc",
    "device compiler",
    "opjit",
    "format",
)


class Difference(NamedTuple):
    """A changed input: its kind (``"source"``, ``"header"``, ``"flag"``, ``"compiler"``, ``"opjit"``, …), and its name with the change."""

    what: str
    text: str


def shown(differences: Sequence[Difference], before: str = "") -> list[str]:
    """Return lines about differences, each with a text in front."""
    lines = [f"    {before}{each.what}: {each.text}" for each in differences[:_MOST_SHOWN]]
    left = len(differences) - len(lines)
    return [*lines, f"    and {left} more"] if left else lines


@dataclass(frozen=True)
class Explanation:
    """Whether a request for an `op` and `target` would hit, and why; str() fits a screen.

    `key` is None without a working compiler: any compiler's binary matches then. A hit has the
    folder `found`, its `place` and the `compiler` of its CUDA code (NVRTC, or nvcc and the reason).
    A miss has the nearest entry, `against`, and its `differences`, the likeliest reason first;
    `unusable` are entries with reasons. `outcome` is the action of a request, in words. `uncached`
    is the reason why the last build of such a request was not cached.
    """

    op: str
    target: str
    key: str | None
    outcome: str
    found: Path | None = None
    place: str = ""
    against: Path | None = None
    differences: tuple[Difference, ...] = ()
    unusable: tuple[tuple[Path, str], ...] = ()
    compiler: str = ""
    uncached: str = ""

    @property
    def reason(self) -> str:
        """The reason in one line."""
        start = f"{self.op} for {self.target}"
        if self.found is not None:
            return f"{start} is built already: {self.found}"
        if self.uncached:
            return f"{start} is not cached: {self.uncached}"
        unusable = [why for folder, why in self.unusable if not self.differences]
        if unusable:
            return f"{start} is in no usable cache: {unusable[0]}"
        if self.differences:
            texts = [difference.text for difference in self.differences]
            return f"{start} is not cached: {'; '.join(texts[:3])}{f'; and {len(texts) - 3} more' if texts[3:] else ''}"
        return f"{start} was never built"

    def fields(self) -> dict[str, Any]:
        """Return the attributes, the arch, the state and the reason, for JSON."""
        return {
            **asdict(self),
            "arch": self.target.partition(" ")[2],
            "state": "miss" if self.found is None else "hit",
            "reason": self.reason,
            "differences": [difference._asdict() for difference in self.differences],
            "unusable": [{"folder": folder, "reason": reason} for folder, reason in self.unusable],
        }

    def __str__(self) -> str:
        lines = [
            f"{self.op} for {self.target}: {'a hit' if self.found else 'a miss'}; {self.outcome}"
        ]
        if self.found is not None:
            lines.append(f"  in {self.place}: {self.found}")
            lines += [f"  CUDA code by {self.compiler}"] if self.compiler else []
        lines += [f"  not cached: {self.uncached}"] if self.uncached else []
        lines += [f"  not used: {folder}: {why}" for folder, why in self.unusable[:3]]
        if self.unusable[3:]:
            lines.append(f"  not used: {len(self.unusable) - 3} more")
        if self.against is not None:
            lines.append(
                f"  compared with the entry built {progress.ago(time.time() - _changed(self.against))}: {self.against}"
            )
            lines += shown(self.differences)
        elif self.found is None and not self.unusable and not self.uncached:
            lines.append(f"  never built for {self.target}")
        return "\n".join(lines)


# An entry's folder, and how it differs from the request.
_Candidate = tuple[Path, tuple[Difference, ...]]


def compare(inputs: BuildInputs, root: Store, found: Path | None = None) -> Explanation:
    """Explain the result of a request; `found` is the folder of the entry that it found."""
    locations = [*layers.locations(inputs, root)]
    key = None if inputs.toolchain is None else inputs.key
    explanation = Explanation(inputs.name, inputs.purpose, key, _outcome(inputs, found))
    if found is not None:
        places = (each.name for each in locations if each.store.base in found.parents)
        # The key of an entry has all that its build read.
        return replace(
            explanation,
            key=found.name,
            found=found,
            place=next(places, ""),
            compiler=_compiler(found),
        )
    candidates, unusable = _candidates(locations, inputs, root)
    wanted = root.base / inputs.place_of_entries
    problem = root.problem(wanted.parent, wanted)
    if problem is not None:
        unusable.insert(0, (root.root, problem))
    host = inputs.request.get("host")
    unusable += [
        (folder, f"it is for {folder.name[:-21].rpartition('.')[2]}, not {host}")
        for location in locations
        for folder in _for_other_hosts(location.store.base / inputs.place_of_entries, str(host))
    ]
    nearest, differing = min(
        candidates, default=(None, ()), key=lambda candidate: len(candidate[1])
    )
    return replace(
        explanation,
        against=nearest,
        differences=differing,
        unusable=tuple(unusable),
        uncached=root.uncached(inputs.key),
    )


def _compiler(found: Path) -> str:
    """Return the compiler of an entry's CUDA code from its manifest."""
    with suppress(EntryError, OSError):
        return read(found)[0].built_with.get("cuda", "")
    return ""


def _for_other_hosts(place: Path, host: str) -> list[Path]:
    """Return the folders of entries that differ in the host only, which the name of a CPU's folder does not end with."""
    target = place.name[:-21]
    if not target.endswith(f".{host}"):
        return []
    every = place.parent.glob(f"{target.removesuffix(host)}*")
    return sorted({*every} - {*layers.others_like(place)})


def _candidates(
    locations: Iterable[Location], inputs: BuildInputs, root: Store
) -> tuple[list[_Candidate], list[tuple[Path, str]]]:
    """Return the usable entries of the same name and target, and the unusable ones with reasons; the newest first."""
    usable = []
    unusable = []
    entries = [
        (location, folder)
        for location in locations
        for place in layers.others_like(location.store.base / inputs.place_of_entries)
        for folder in place.glob("[!.]*")
    ]
    entries.sort(key=lambda entry: -_changed(entry[1]))
    for location, folder in entries[:_MOST_CANDIDATES]:
        try:
            _, manifest = verify(folder, inputs.op_target, trusted_as=location.source)
            shipped = location.source is not None
            note = root.seen(manifest.key)
            usable.append((folder, differences(manifest, inputs, shipped, note)))
        except (FileNotFoundError, NotADirectoryError):
            pass  # not an entry, or being removed
        except (EntryError, OSError) as error:
            unusable.append((folder, str(error)))
    return usable, unusable


def _outcome(inputs: BuildInputs, found: Path | None) -> str:
    can_build = inputs.toolchain is not None
    if found is not None:
        lacks = "; no compiler works here, so any compiler's binary matches"
        return f"a request would use it{'' if can_build else lacks}"
    if is_on("OPJIT_OFFLINE"):
        return "a request would fail, because OPJIT_OFFLINE forbids building it"
    fails = "fail, because no compiler works here (run `opjit doctor`)"
    asks = "query the remote, and without an entry there " if os.environ.get("OPJIT_REMOTE") else ""
    return f"a request would {asks}{'build it' if can_build else fails}"


def differences(
    manifest: Manifest, inputs: BuildInputs, shipped: bool = False, note: Path | None = None
) -> tuple[Difference, ...]:
    """Return how an entry's inputs differ from the requested ones; of a shipped binary, without the compilers and opjit's version."""
    before = manifest.document
    sources = {*map(inputs.places.name, inputs.sources), str(before.get("kernel"))}
    found = [*document_differences(before, inputs.request, sources)]
    same_tools = before.get("toolchain") == inputs.request["toolchain"]
    with suppress(EntryError):  # it does not list what its build read
        known = tuple(f"{name} " for name in _mapping(before.get("known")))
        for text in inputs.changes(before, note):
            if not text.startswith(known) and (same_tools or not text.startswith("<")):
                found.append(Difference(_kind(text.partition(" ")[0]), text))
    if shipped:
        tools = {
            name
            for part, name in _NAMES.items()
            if part.startswith(("cc.", "nvcc.", "nvrtc.", "device."))
        }
        found = [each for each in found if each.what not in {"opjit", *tools}]
    return _likely_first(found)


def _likely_first(found: Iterable[Difference]) -> tuple[Difference, ...]:
    order = {what: place for place, what in enumerate(_LIKELY)}
    return tuple(sorted(found, key=lambda each: order.get(each.what, len(order))))


def document_differences(
    before: Mapping[str, Any], now: Mapping[str, Any], sources: set[str]
) -> tuple[Difference, ...]:
    """Return how two documents differ, the likeliest reason for a miss first; `sources` names inputs that are not headers."""
    found = [*_inputs(_mapping(before.get("known")), now["known"], sources)]
    flags = _mapping(before.get("flags"))
    for kind in sorted({*flags, *now["flags"]}, key=str):
        what = _FLAGS.get(kind, f"{kind} flag")
        found += _flags(what, flags.get(kind, []), now["flags"].get(kind, []))
    if before.get("glue") != now.get("glue"):
        found.append(Difference("opjit", "the glue's template changed"))
    if now["toolchain"] is not None:  # without a compiler, any compiler's binary matches
        before = {**_mapping(before.get("toolchain")), **before}
        now = {**now["toolchain"], **now}
    for name in sorted({*before, *now} - _COMPARED_APART):
        if before.get(name) != now.get(name):
            text = f"{_value_shown(now.get(name))}, {_value_shown(before.get(name))} before"
            found.append(Difference(_NAMES.get(name, name), text))
    return _likely_first(found)


def _value_shown(value: object) -> str:
    return "none" if value in (None, "") else str(value)[:200]


def _kind(name: str) -> str:
    """Return the kind of a file that a build read."""
    return "library" if name.endswith((".a", ".o", ".so")) else "header"


def _inputs(
    before: Mapping[str, Any], now: Mapping[str, str], sources: set[str]
) -> Iterator[Difference]:
    """Yield the changed files. A file that is neither opjit's nor a source nor linked is a header."""
    for name in sorted({*before, *now}):
        if before.get(name) == now.get(name):
            continue
        what = _kind(name)
        if name.startswith("<opjit>/"):
            what = "opjit"
        elif name in sources or backends.of_source(name) is not None:
            what = "source"
        change = "changed"
        if name not in now:
            change = "is no longer used"
        elif name not in before:
            change = "is new"
        yield Difference(what, f"{name} {change}")


def _flags(what: str, before: Any, now: list[str]) -> Iterator[Difference]:
    then = [str(flag) for flag in before] if isinstance(before, list) else []
    gone = Counter(then) - Counter(now)
    new = Counter(now) - Counter(then)
    for flags, verb in ((new, "is new"), (gone, "was removed")):
        for flag in flags:
            yield Difference(what, f"{flag} {verb}")
    if then != now and not gone and not new:
        yield Difference(what, f"the same in a different order: {' '.join(now)}")


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _changed(folder: Path) -> float:
    try:
        return folder.lstat().st_mtime
    except OSError:
        return 0.0
