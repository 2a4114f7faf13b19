"""``opjit precompile --check`` and `opjit.ready`: whether all that a list needs is there, by one file that precompile wrote at its end.

Nothing is planned and no library is read. The set's file says what the keys of its entries depend on: the list, the options, the versions
of torch, CUDA and opjit, the sources and the compilers. If all of it is the same here, a request asks for these keys.
"""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from opjit import backends, files
from opjit.cpp_extension import identity, light
from opjit.errors import CacheWarning, OpjitError, PrecompileError, RecordError
from opjit.recipe import recipe, toolchain
from opjit.shared_library import identity as libraries
from opjit.store import layers, manifest, sets
from opjit.store.sets import CompleteSet
from opjit.store.store import SETS, Store, default_root
from opjit.wanted import Wanted

_EXTENSION, _LIBRARY = "C++", "shared library"


def fits(path: Path, archs: Sequence[str], extensions: bool) -> dict[str, Any]:
    """Return what a set of the list at `path` is for, in this process."""
    try:
        listed = files.digest(str(path))
    except OSError as error:
        raise RecordError(f"{path} is not a list from `opjit record`: {error}; record it again") from None
    variables = {name: os.environ.get(name, "") for name in ("OPJIT_DEBUG", "OPJIT_PATH", *(["OPJIT_FAST"] if extensions else []))}
    return {"list": listed, "archs": sorted(set(archs)), "extensions": extensions, "host": platform.machine(), **variables,
            "torch": str(torch.__version__), "CUDA": torch.version.cuda, "opjit": f"{recipe.FORMAT} {recipe.glue_digest()}",
            **({"Python": sys.version, "light headers": light.VERSION} if extensions else {})}


def mark(needed: Iterable[Wanted], store: Store, path: Path, fitting: dict[str, Any]) -> Path | None:
    """Write the file of a set that is complete, and return it. A warning says why not.

    Args:
        fitting: what `fits` returned before the entries were planned.
    """
    entries, used, compilers = dict[str, str](), dict[str, str](), list[tuple[str, str, dict[str, str] | None]]()
    try:
        for wanted in needed:
            entry = wanted.find(store, warn=False)
            if entry is None:
                raise OpjitError(f"{wanted} was removed again")
            beside = layers.holds(entry.library)
            entries[str(entry.folder) if beside else os.path.join(*entry.folder.parts[-3:])] = str(wanted)
            document = {} if beside else manifest.parse(files.read(entry.folder / manifest.NAME, manifest.MAX_BYTES)).document
            used |= wanted.sources(document)
            runtime = wanted.kind.runtime if wanted.kind is not None else "" if document.get("archs") is None else "cuda"
            maker = (wanted.kind.backend.name if wanted.kind is not None else _EXTENSION, runtime, document.get("toolchain"))
            if not wanted.by_torch:
                maker = _LIBRARY, " ".join(document["toolchain"]), document["toolchain"]
            if not beside and maker not in compilers:
                compilers.append(maker)
        found = CompleteSet(str(path.absolute()), fitting, entries, used, {}, compilers)
        stamps = {path: [*(files.stamp(path) or ())] for path in used}  # before the contents are read
        for problem in _changed(found, store):
            raise OpjitError(problem)
        return found._replace(stamps=stamps).save(store)
    except (OSError, OpjitError) as error:
        warnings.warn(CacheWarning(f"`opjit precompile --check` will not know that {path} is complete: {error}"), stacklevel=3)
        return None


def ready(recorded: str | os.PathLike[str], archs: Sequence[str] = (), *, store: str | os.PathLike[str] | None = None,
          extensions: bool = False) -> int:
    """Prove, before a program serves, that it will build nothing: every entry of a list is there. This takes milliseconds.

    Args:
        recorded: the list from ``opjit record`` with which ``opjit precompile --from`` has filled a cache or a layer.
        archs, store, extensions: as `opjit.precompile` had them. Without `store`, the cache and OPJIT_LAYERS are searched.

    Returns:
        The number of entries.

    Raises:
        PrecompileError: the message names what is missing, or what has changed since.
        RecordError: the list cannot be read.

    Example:
        >>> print(opjit.precompile(recorded="ops.json"))
        1 built, 0 already there, 0 skipped, 0 failed, … s
        >>> opjit.ready("ops.json")
        1
    """
    path, fitting = Path(recorded), fits(Path(recorded), archs, extensions)
    roots = [default_root(), *layers.named()] if store is None else [Path(os.path.abspath(os.path.expanduser(store)))]
    stores = [each for each in map(Store, roots) if each.trusted()]
    found = next(filter(None, (sets.read(each.base / SETS / recipe.document_key(fitting)) for each in stores)), None)
    if found is None:
        problems, count = [(str(path), _why_none(path, fitting, stores))], 0
    else:
        count = len(found.entries)
        problems = [(name, f"{name} is missing: no {folder}") for folder, name in found.entries.items() if not _is_there(folder, stores)]
        problems += [(str(path), problem) for problem in _changed(found, stores[0])]
    if problems:
        raise PrecompileError(f"{path} is not ready in {' or '.join(map(str, roots))}; run `opjit precompile --from {path}`, with the same "
                              "options, and see:\n" + "\n".join(text for _, text in problems),
                              [(name, OpjitError(text)) for name, text in problems])
    return count


def _is_there(folder: str, stores: Sequence[Store]) -> bool:
    for store in stores:
        try:
            if files.distrusted(store.base / folder / manifest.NAME) is None:
                return True
        except OSError:
            continue
    return False


def _changed(found: CompleteSet, store: Store) -> Iterator[str]:
    """Say what decides keys and is no longer as it was."""
    for path, digest in found.files.items():
        stamp = files.stamp(path)
        if stamp is not None and [*stamp] == found.stamps.get(path):
            continue
        try:
            now = files.digest(path)
        except OSError as error:
            now = str(error)
        if now != digest:
            yield f"{path} is not what was compiled"
    for name, runtime, made_by in found.compilers:
        ways = _compilers(name, runtime, store)
        if ways and made_by not in ways and (name in (_EXTENSION, _LIBRARY) or not recipe.takes(ways, made_by)):
            yield f"entries for {name} were made by {made_by}, and the compilers here are {' or '.join(map(str, ways))}"


def _compilers(name: str, runtime: str, store: Store) -> list[Mapping[str, str]]:
    """Return the compilers that enter keys here; where there are none, a request takes the entries of any."""
    if name == _EXTENSION:
        full, others, _ = identity.find_compilers(store.notes, runtime == "cuda")
        return [way for way in (full, *others) if way]
    if name == _LIBRARY:
        here = libraries.compilers({*runtime.split()}, store.notes)
        return [here] if here else []
    backend = next((each for each in backends.all_backends() if each.name == name), None)
    return [*toolchain.identities_of(backend, runtime, store.notes)] if backend is not None else []


def _why_none(path: Path, fitting: Mapping[str, Any], stores: Sequence[Store]) -> str:
    """Say what sets the most similar set apart."""
    similar = [each.fits for each in sets.known(stores) if each.path == str(path.absolute()) or each.fits["list"] == fitting["list"]]
    if not similar:
        return "no set of this list was completed"
    apart = min(([(name, each.get(name), now) for name, now in fitting.items() if each.get(name) != now] for each in similar), key=len)
    return "a set was completed with " + ", ".join(f"{name} {before!r} (here {now!r})" for name, before, now in apart)
