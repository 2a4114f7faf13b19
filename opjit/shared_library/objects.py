"""Object files that builds of several sources keep, so that an edit of one compiles only that. They are verified as an op's parts are.

    <root>/v2/parts/<key>/    object.o, reads.json, parts.json

The key has the compilers, the command and the source's text. reads.json lists the files that the compilation
read, and the paths that named none, by absolute paths. An object is taken only if all of them are still so."""

import functools
import os
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from opjit import files
from opjit.builder import parts
from opjit.builder.ninja import ToolCommand
from opjit.errors import EntryError, UntrustedFolder
from opjit.recipe import reads
from opjit.recipe.build_inputs import ProjectInputs
from opjit.recipe.reads import Reads
from opjit.recipe.record_reader import RecordReader

_OBJECT = "object.o"
_MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class KeptObjects:
    """The object files of one build. `base` is the store's folder, `reader` reads the records of its tools, and `more` is what else decides
    them."""

    inputs: ProjectInputs
    base: Path
    reader: RecordReader
    more: object = None
    read: dict[Path, Reads] = field(default_factory=dict)  # what made each object, by its place

    def missing(self, steps: Sequence[ToolCommand]) -> list[ToolCommand]:
        """Put the kept objects of several sources in their places, and return the steps without a kept object."""
        several = len(steps) > 1
        return [step for step in steps if not (several and self._take(step))]

    def _take(self, step: ToolCommand) -> bool:
        """Put a kept object in its place, if there is one. A build with unknown inputs does without."""
        if self.inputs.doubt:
            return False
        folder = parts.find_parts(self.base, self._name(step), self._fits)
        if folder is None:
            return False
        with suppress(OSError, EntryError, ValueError, TypeError):  # it is being removed
            step.output.write_bytes(files.read(folder / _OBJECT, _MAX_BYTES))
            self.read[step.output] = parts.kept_reads(folder)
            return True
        return False

    def keep(self, steps: Iterable[ToolCommand]) -> None:
        """Note the files that the compilations which succeeded read, by their records, and keep the objects for other builds."""
        for step in steps:
            if step.done.exists():
                self._keep(step)

    def _keep(self, step: ToolCommand) -> None:
        place = step.output
        self.read[place] = read = replace(self.reader, sources=(step.source,)).reads([step.log])
        with suppress(OSError, UntrustedFolder):
            if (
                read.doubt
                or self.inputs.doubt
                or os.fsencode(self.reader.work) in place.read_bytes()
            ):
                return  # no other build has the folder `work`

            def make(staged: Path) -> None:
                (staged / _OBJECT).write_bytes(place.read_bytes())
                parts.keep_reads(staged, read)

            parts.publish_parts(self.base, self._name(step), self._fits, make)

    def read_by_all(self, linking: Sequence[ToolCommand]) -> Reads:
        """Return what the compilers of all objects and the linkers read."""
        objects = tuple(str(each) for step in linking for each in step.needs)
        reader = replace(self.reader, sources=objects)
        linked = reader.reads([step.log for step in linking])
        return functools.reduce(Reads.joined, [*self.read.values(), linked])

    def _fits(self, folder: Path) -> bool:
        """Whether an object is unchanged, and what its compiler read is."""
        return parts.is_current(folder, [_OBJECT], self.reader.moment)

    def _name(self, step: ToolCommand) -> str:
        """Return the name of an object for its inputs, apart from the files that its compiler reads."""
        work = self.reader.work
        path = step.source.replace(f"{work}/generated/", reads.GENERATED)
        words = (step.key or shlex.join(step.command)).replace(work, "<work>")
        digest = self.reader.moment.digest(path)
        inputs = self.inputs
        content = [
            inputs.toolchain,
            inputs.flags.get("launcher"),
            inputs.flags.get("environment"),
            self.more,
            digest,
            words,
            os.getcwd(),
        ]
        return parts.name_of(content)
