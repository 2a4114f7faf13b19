"""The handshake of both parts of a .cu file: if a kernel's parameter is passed by value, its type
must have one layout, or the build fails with its name.

The host's part notes the size, the alignment and members' offsets of each parameter that may be a class in a section of its object file.
The device's part compares them by static_assert."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Layout(NamedTuple):
    """A parameter of a kernel that may be a class, so both parts must have the same layout."""

    type: str
    name: str
    members: tuple[str, ...]  # with offsets to compare

    def note(self, number: int) -> str:
        """Return code for the kernel's body on the host, which notes the layout in the section opjit_layout."""
        values = [f"sizeof({self.name})", f"alignof(decltype({self.name}))"]
        values += [f"__builtin_offsetof(decltype({self.name}), {one})" for one in self.members]
        shown = "".join(f", %c{index}" for index in range(2, len(values)))
        given = ", ".join(f'"i"({value})' for value in values)
        return (
            '__asm__ volatile(".pushsection opjit_layout,\\"\\",@progbits\\n'
            f".quad {number}, %c0, %c1, {len(self.members)}{shown}\\n"
            f'.popsection" : : {given}); '
        )

    def check(self, seen: Iterable[Sequence[int]]) -> str:
        """Return code for the kernel's body on the device, which rejects a layout that the
        host's part does not have.
        """
        values = [f"sizeof({self.name})", f"alignof(decltype({self.name}))"]
        values += [f"__INTADDR__(&((decltype({self.name}) *)0)->{one})" for one in self.members]
        same = [
            " && ".join(
                f"{value} == {number}" for value, number in zip(values, numbers, strict=True)
            )
            for numbers in seen
        ]
        message = f"the host's part has another layout of {self.name}, of type {self.type}: give both parts the same members"
        return f'static_assert({" || ".join(same)}, "{message}");' if same else ""
