"""torch.autograd.gradcheck, in float64, of the forms of the LLTM cell.

    python examples/05_lltm/grad_check.py          every form that runs on this machine
    python examples/05_lltm/grad_check.py c cpp    some
"""

from __future__ import annotations

import argparse

import torch
from cells import LLTM, VARIANTS, State, device_of, make


def check(cell: LLTM, device: str, batch: int, features: int, state_size: int) -> None:
    """Stop unless the gradients of every x and parameter are the function's slopes."""
    generator = torch.Generator().manual_seed(3)
    leaves = [torch.randn(batch, size, generator=generator, dtype=torch.float64).to(device).requires_grad_()
              for size in (features, state_size, state_size)]

    def run(x: torch.Tensor, old_h: torch.Tensor, old_cell: torch.Tensor, *_: torch.Tensor) -> State:
        found: State = cell(x, (old_h, old_cell))
        return found

    torch.autograd.gradcheck(run, (*leaves, *cell.parameters()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", choices=[[], *VARIANTS], metavar="variant")
    parser.add_argument("-c", "--cuda", action="store_true", help="run `py` and `cpp` on a GPU")
    options = parser.parse_args()
    for variant in options.variants or [name for name in VARIANTS if name != "cuda" or torch.cuda.is_available()]:
        device = device_of(variant, options.cuda and variant != "c")
        check(make(variant, 4, 5, torch.float64, device), device, 3, 4, 5)
        print(f"{variant} on {device}: gradients are right")


if __name__ == "__main__":
    main()
