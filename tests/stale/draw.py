"""Draws a program of several pieces and one of its edits."""

import random

from tests.stale.case import Case
from tests.stale.draft import Draft
from tests.stale.includes import graph
from tests.stale.pieces import PIECES

LETTERS = {"build": "b", "objects": "b", "load": "l", "load-objects": "l", "op": "o"}
ODD_ROOTS = ["pro ject", "pro#ject", "pro$ject", "projêt"]


def draw(kind: str, seed: int, number: int) -> Case:
    """The case of a kind with a number. It is the same each time."""
    rng = random.Random(f"{seed} {kind} {number}")
    draft = Draft(rng, kind)
    fitting = [name for name, (_, kinds) in PIECES.items() if LETTERS[kind] in kinds]
    chosen = rng.sample(fitting, rng.choice([0, 1, 1, 2]))
    if not chosen or rng.random() < 0.5:
        chosen.append("headers")
    # The edit is one of the last piece's, so that all pieces have their turn.
    rng.shuffle(chosen)
    for name in chosen:
        draft.edits.clear()
        (graph if name == "headers" else PIECES[name][0])(draft)
    # All edits of one name count as one, or those of files would hide the rest.
    name = rng.choice(sorted({name for name, _ in draft.edits}))
    change = rng.choice([change for each, change in draft.edits if each == name])
    after = draft.edited_by(change)
    # Ninja, which `load` runs, takes no such names.
    roots = ODD_ROOTS if LETTERS[kind] == "b" and rng.random() < 0.3 else ["project"]
    return Case(
        f"{chosen[-1]}: {name}",
        kind,
        draft.state(),
        after.state(),
        together=rng.random() < 0.5,
        quiet=rng.random() < 0.3,
        root=rng.choice(roots),
        clock=draft.clock,
    )
