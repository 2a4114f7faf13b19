"""Why a request hits or misses, and which input of a build changed; ``opjit why``. Looks, and builds and changes nothing.

A miss is explained by the nearest entry of the same op: the one whose document (see Recipe.document) differs in the fewest inputs
from the document that is wanted now.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from opjit import api, catalog, layers, store
from opjit.environment import is_on
from opjit.errors import EntryError, UnknownEntry
from opjit.manifest import Manifest
from opjit.op import Op
from opjit.recipe import Recipe
from opjit.store import Store, default_root

_LOOKED_AT = 200  # entries of an op and target, the newest
_SHOWN = 12  # differences
_FLAGS = {"c": "flag", "cuda": "nvcc flag", "link": "linker flag", "stubs": "library of torch's"}
# Other parts of a document, and what they are called. What is not here is named as the document names it.
_NAMES = {"schema": "schema", "cc.version": "compiler", "cc.machine": "compiler's target", "nvcc.build": "nvcc", "arch": "arch",
          "runtime": "runtime", "backend": "backend", "dispatch_key": "dispatch key", "kernel": "source's name", "format": "format"}
# What changes most often comes first; the places of what has no name come last.
_LIKELY = ("backend", "arch", "runtime", "source", "header", "schema", *_FLAGS.values(), "compiler", "compiler's target", "nvcc", "opjit",
           "format")  # the first three only where one was named to compare with


class Difference(NamedTuple):
    """One input that is not what it was.

    Attributes:
        what: its kind: ``"source"``, ``"header"``, ``"schema"``, ``"flag"``, ``"compiler"``, ``"nvcc"``, ``"arch"``, ``"opjit"``, …
        text: what became of it, in words, with its name.
    """

    what: str
    text: str


@dataclass(frozen=True)
class Explanation:
    """What a request for an op would meet, and why; its text fits a screen.

    Attributes:
        op, target: what was asked for.
        key: of the binary that is wanted; None where no compiler works here, and then anybody's binary would do.
        found: the folder of the entry that the request would use; None is a miss.
        place: whose that is, in words.
        against: the entry that was compared with.
        differences: how that one differs, the likeliest reason first.
        unusable: entries of this op and target that are not used, and why.
        elsewhere: how many entries of the op there are for other targets.
        outcome: what a request would do.
    """

    op: str
    target: str
    key: str | None
    found: Path | None
    place: str
    against: Path | None
    differences: tuple[Difference, ...]
    unusable: tuple[tuple[Path, str], ...]
    elsewhere: Mapping[str, int]
    outcome: str

    @property
    def reason(self) -> str:
        """One line."""
        start = f"{self.op} for {self.target}"
        if self.found is not None:
            return f"{start} is built already: {self.found}"
        damaged = [why for folder, why in self.unusable if folder.name == self.key]
        if damaged:
            return f"{start} is in no cache that can be used: {damaged[0]}"
        if self.differences:
            texts = [difference.text for difference in self.differences]
            return f"{start} is in no cache: {'; '.join(texts[:3])}{f'; and {len(texts) - 3} more' if texts[3:] else ''}"
        if self.unusable:
            return f"{start} is in no cache that can be used: {self.unusable[0][1]}"
        if self.elsewhere:
            return f"{start} was never built; there are entries for {', '.join(self.elsewhere)}"
        return f"{start} was never built"

    def fields(self) -> dict[str, Any]:
        """For JSON: the attributes, and besides them the arch, a verdict and the reason."""
        return {**asdict(self), "arch": self.target.partition(" ")[2], "state": "miss" if self.found is None else "hit",
                "reason": self.reason, "differences": [difference._asdict() for difference in self.differences],
                "unusable": [{"folder": folder, "reason": reason} for folder, reason in self.unusable]}

    def __str__(self) -> str:
        lines = [f"{self.op} for {self.target}: {'a hit' if self.found else 'a miss'}; {self.outcome}"]
        if self.found is not None:
            lines.append(f"  in {self.place}: {self.found}")
        lines += [f"  not used: {folder}: {why}" for folder, why in self.unusable[:3]]
        if self.unusable[3:]:
            lines.append(f"  and {len(self.unusable) - 3} more that are not used")
        if self.against is not None:
            lines.append(f"  compared with {_age(self.against)}, {self.against}:")
            lines += [f"    {difference.what}: {difference.text}" for difference in self.differences[:_SHOWN]]
            if not self.differences:
                lines.append("    it was built from the same")
            if self.differences[_SHOWN:]:
                lines.append(f"    and {len(self.differences) - _SHOWN} more")
        elif self.found is None and not self.unusable:
            others = ", ".join(f"{target} ({count})" if count > 1 else target for target, count in self.elsewhere.items())
            lines.append(f"  never built for {self.target}; there are {f'entries for {others}' if others else 'no entries for any other'}")
        return "\n".join(lines)


class _Place(NamedTuple):
    """A store that a request looks into.

    Attributes:
        name: in words.
        like: the kernel's source, for the store that lies beside it; see layers.find.
    """

    name: str
    store: Store
    like: Path | None = None

    def shelves(self, qualified: str) -> list[Path]:
        """The folders with an op's entries, one for each target."""
        with suppress(OSError):
            return sorted(path for path in (self.store.base / qualified.replace("::", ".")).iterdir() if path.is_dir())
        return []


def explain(op: str | Op, device: object = None, arch: str | None = None, against: str | None = None) -> Explanation:
    """Tell whether `opjit.get` would find an op's binary, where, and if not, what changed since the nearest one was built.

    Of ops only: `opjit.load` and `opjit.load_inline` are not looked at. What only the remote has counts as a miss, which would be
    fetched; the remote is asked.

    Args:
        op: its name, or itself.
        device: this machine's devices of that kind; None is the current accelerator, else the CPU.
        arch: ask for this arch (``"sm_90"``, ``"x86-64-v3"``) instead, whatever this machine has.
        against: how the key of the entry to compare with starts; it may be of another target. None is the nearest.

    Raises:
        UnknownEntry: no entry of the op has a key that starts so, or several have.
        UnknownOp, UnknownDevice, UnknownArch, DeviceUnavailable, NoKernel: see `opjit.errors`.

    Example:
        >>> print(opjit.explain("mylib::scale", "cpu"))
        mylib::scale for cpu x86-64-v3: a miss; a request would build it
          compared with the nearest entry, of 3 min ago, /home/me/.cache/opjit/v1/mylib.scale/x86-64-v3/53493f8d…:
            source: scale.c changed, 14 lines, 12 before
    """
    declared = op if isinstance(op, Op) else catalog.find(op)
    root = Store(default_root())
    recipe = api.describe(declared, api.wanted(device, arch), root)
    with warnings.catch_warnings():  # its reason is in the explanation
        warnings.simplefilter("ignore")
        entry = layers.find(recipe) or root.find(recipe)
    return _compare(recipe, root, entry.folder if entry else None, against, ask=True)


def miss(recipe: Recipe, root: Store) -> Explanation:
    """Explain a miss that has happened."""
    return _compare(recipe, root, None, None)


def _compare(recipe: Recipe, root: Store, found: Path | None, against: str | None, ask: bool = False) -> Explanation:
    """Put an explanation together; `ask` the remote, too."""
    qualified, folder, places = recipe.schema.qualified, recipe.target.folder, _places(recipe, root)
    elsewhere: Counter[str] = Counter()
    for place in places:
        elsewhere.update({shelf.name: count for shelf in place.shelves(qualified) if shelf.name != folder and (count := len(_keys(shelf)))})
    good, unusable = _candidates(places, recipe) if found is None else ([], [])
    problem = root.problem(root.folder(qualified, recipe.target).parent, root.folder(qualified, recipe.target)) if found is None else None
    if problem is not None:
        unusable.insert(0, (root.root, problem))
    if against is not None:
        good = [_named(places, recipe, against)]
    compared = min(good, default=None, key=lambda candidate: len(candidate.differences))
    return Explanation(qualified, str(recipe.target), recipe.key, found, next((p.name for p in places if found and p.store.base in
                                                                              found.parents), ""),
                       compared.folder if compared else None, compared.differences if compared else (), tuple(unusable),
                       dict(sorted(elsewhere.items())), _outcome(recipe, found, ask))


class _Candidate(NamedTuple):
    folder: Path
    differences: tuple[Difference, ...]


def _places(recipe: Recipe, root: Store) -> list[_Place]:
    """Where a request looks, in its order."""
    return [_Place("the binaries beside its source", Store(recipe.folder / layers.FOLDER), recipe.source),
            *(_Place(f"the layer {layer}", Store(layer)) for layer in layers.named()), _Place("the cache", root)]


def _keys(shelf: Path) -> list[str]:
    with suppress(OSError):
        return [name for name in os.listdir(shelf) if not name.startswith(".")]
    return []


def _candidates(places: list[_Place], recipe: Recipe) -> tuple[list[_Candidate], list[tuple[Path, str]]]:
    """Entries of the op and target, the newest first; and those that are not to be used, the wanted one first."""
    good, bad = [], []
    for place in places:
        shelf = place.store.folder(recipe.schema.qualified, recipe.target)
        folders = sorted((shelf / key for key in _keys(shelf)), key=lambda folder: (folder.name != recipe.key, -_changed(folder)))
        for folder in folders[:_LOOKED_AT]:
            try:
                _, described = store.verify(folder, recipe.target, like=place.like, unnoticed=True)
                good.append((_changed(folder), _Candidate(folder, differences(described, recipe, place.like is not None))))
            except (FileNotFoundError, NotADirectoryError):
                pass  # no entry, or one that goes away
            except (EntryError, OSError) as error:
                bad.append((folder, str(error)))
    return [candidate for _, candidate in sorted(good, key=lambda item: -item[0])], bad


def _named(places: list[_Place], recipe: Recipe, prefix: str) -> _Candidate:
    """The entry of the op, for any target, whose key starts so."""
    matching = {folder: place for place in places for shelf in place.shelves(recipe.schema.qualified)
                for key in _keys(shelf) if key.startswith(prefix) and (folder := shelf / key)}
    keys = sorted({folder.name for folder in matching})
    if not keys:
        raise UnknownEntry(f"no entry of {recipe.schema.qualified} has a key that starts with {prefix!r}; `opjit cache ls` shows the keys",
                           prefix, keys)
    if len(keys) > 1:
        raise UnknownEntry(f"the keys of {len(keys)} entries start with {prefix!r}: {', '.join(key[:16] for key in keys[:4])}; give more "
                           "of the one that is meant", prefix, keys)
    folder, place = next(iter(matching.items()))
    try:
        described, _ = store.read(folder, place.like)
    except (EntryError, OSError) as error:
        raise UnknownEntry(f"the entry {folder} cannot be compared with: {error}", prefix, keys) from error
    return _Candidate(folder, differences(described, recipe, place.like is not None))


def _outcome(recipe: Recipe, found: Path | None, ask: bool) -> str:
    if found is not None:
        return "a request would use it" + ("; no compiler works here, so whoever built it does not matter" if recipe.key is None else "")
    if is_on("OPJIT_OFFLINE"):
        return "a request would be an error, as OPJIT_OFFLINE forbids to build it"
    there, told = _remote(recipe) if ask and os.environ.get("OPJIT_REMOTE") else (False, "")
    if there:
        return f"a request would fetch it: {told}"
    build = "be an error, as no compiler works here (`opjit doctor` says more)" if recipe.key is None else "build it"
    return f"a request would {build}{f'; {told}' if told else ''}"


def _remote(recipe: Recipe) -> tuple[bool, str]:
    """Whether the remote has it, and that in words."""
    from opjit import remote
    from opjit.objects import Objects

    shown = Objects(os.environ["OPJIT_REMOTE"]).shown
    try:
        there = remote.holds(recipe)
    except Exception as error:  # whatever a network can do
        return False, f"the remote {shown} does not help: {remote.reason(error)}"
    return there, f"the remote {shown} {'has' if there else 'does not have'} it"


def differences(described: Manifest, recipe: Recipe, shipped: bool = False) -> tuple[Difference, ...]:
    """How what an entry was built from differs from what is wanted now, the likeliest reason for a miss first.

    Args:
        shipped: leave out what does not matter for a binary that lies beside its source: who compiled it, and opjit's version.
    """
    before, now = dict(described.document), recipe.document()
    lines = (_lines(described), recipe.lines())
    found = [*_inputs(_mapping(before.pop("inputs", {})), now.pop("inputs"), lines, {recipe.source.name, str(before.get("kernel"))})]
    same_arch = before.get("arch") == now["arch"]
    then_flags, now_flags = _mapping(before.pop("flags", {})), now.pop("flags")
    for kind in sorted({*then_flags, *now_flags}, key=str):
        found += _flags(_FLAGS.get(kind, f"{kind} flag"), then_flags.get(kind, []), now_flags.get(kind, []), same_arch)
    tools, wanted_tools = _mapping(before.pop("toolchain", {})), now.pop("toolchain")
    if wanted_tools is not None:  # where no compiler is known, anybody's binary will do
        before, now = {**tools, **before}, {**wanted_tools, **now}
    if before.pop("glue", None) != now.pop("glue"):
        found.append(Difference("opjit", "the template of the glue is another"))
    found += [Difference(_NAMES.get(name, name), _changed_value(before.get(name), now.get(name)))
              for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if shipped:
        own = {"opjit", *(_NAMES[name] for name in ("cc.version", "cc.machine", "nvcc.build"))}
        found = [difference for difference in found if difference.what not in own]
    order = {what: place for place, what in enumerate(_LIKELY)}
    return tuple(sorted(found, key=lambda difference: order.get(difference.what, len(order))))


def _inputs(before: Mapping[str, Any], now: Mapping[str, str], lines: tuple[dict[str, int], dict[str, int]],
            sources: set[str]) -> Iterator[Difference]:
    """What became of each file; what is neither opjit's nor one of the sources is a header."""
    for name in sorted({*before, *now}):
        if before.get(name) == now.get(name):
            continue
        what = "opjit" if name.startswith("<opjit>/") else "source" if name in sources else "header"
        then_count, count = lines[0].get(name), lines[1].get(name)
        if name not in now:
            yield Difference(what, f"{name} is not part of it any more")
        elif name not in before:
            yield Difference(what, f"{name} is new{'' if count is None else f', {_count(count)}'}")
        elif then_count is None or count is None:
            yield Difference(what, f"{name} changed")
        else:
            yield Difference(what, f"{name} changed, {_count(count)}, {'as' if count == then_count else then_count} before")


def _count(lines: int) -> str:
    return f"{lines} line{'s' * (lines != 1)}"


def _flags(what: str, before: Any, now: list[str], same_arch: bool) -> Iterator[Difference]:
    """Flags that came, went or moved; those that an arch stands for are not named beside the arch."""
    then = [str(flag) for flag in before] if isinstance(before, list) else []
    gone, come = Counter(then) - Counter(now), Counter(now) - Counter(then)
    for flags, verb in ((come, "is new"), (gone, "is not given any more")):
        for flag in flags:
            if same_arch or not flag.startswith(("-march=", "-gencode=")):
                yield Difference(what, f"{flag} {verb}")
    if then != now and not gone and not come:
        yield Difference(what, f"the same in another order: {' '.join(now)}")


def _changed_value(before: object, now: object) -> str:
    return ", ".join("none" if value in (None, "") else str(value)[:200] for value in (now, before)) + " before"


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _lines(described: Manifest) -> dict[str, int]:
    """The line counts that a build noted; nobody vouches for them."""
    with suppress(ValueError, TypeError, RecursionError):
        noted = json.loads(described.built_with["lines"]) if "lines" in described.built_with else {}
        return {name: count for name, count in _mapping(noted).items() if isinstance(count, int)}
    return {}


def _changed(folder: Path) -> float:
    try:
        return folder.lstat().st_mtime
    except OSError:
        return 0.0


def _age(folder: Path) -> str:
    """An entry, by its age."""
    seconds = time.time() - _changed(folder)
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"the entry of {seconds / length:.0f} {unit} ago"
    return "the entry of just now"
