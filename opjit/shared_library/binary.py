"""A request for a shared library."""

from dataclasses import dataclass

from opjit import processes
from opjit.shared_library.identity import Library
from opjit.store.entry import Entry
from opjit.store.store import Store
from opjit.wanted import BinaryRequest


@dataclass(frozen=True)
class LibraryRequest(BinaryRequest):
    """A request for a shared library."""

    inputs: Library
    by_torch = False

    def build(self, store: Store) -> Entry:
        with processes.importing:
            from opjit.shared_library import compilation
        return compilation.build_library_binary(self.inputs, store, self.must_store)
