"""Compare the forward and backward values of all forms of the LLTM cell with plain Python.

    python examples/05_lltm/check.py          every form that runs on this machine
    python examples/05_lltm/check.py c cpp    some
"""

from __future__ import annotations

import argparse

import torch
from cells import VARIANTS, device_of, make

NAMES = ("new_h", "new_cell", "d x", "d old_h", "d old_cell", "d weights", "d bias")


def values(variant: str, device: str, batch: int, features: int, state_size: int) -> list[torch.Tensor]:
    """Both results, and the gradients of inputs and parameters, in float64 on the CPU."""
    cell = make(variant, features, state_size, torch.float64, device)
    generator = torch.Generator().manual_seed(7)
    x, *state = (torch.randn(batch, size, generator=generator, dtype=torch.float64).to(device).requires_grad_()
                     for size in (features, state_size, state_size))
    new_h, new_cell = cell(x, (state[0], state[1]))
    (new_h.square().sum() + new_cell.sin().sum()).backward()
    found = [new_h, new_cell, *(leaf.grad for leaf in (x, *state, cell.weights, cell.bias))]
    return [value.detach().cpu() for value in found if value is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", choices=[[], *VARIANTS], metavar="variant")
    parser.add_argument("-c", "--cuda", action="store_true", help="run `py` and `cpp` on a GPU")
    options = parser.parse_args()
    for variant in options.variants or ["cpp", "c", *(["cuda"] if torch.cuda.is_available() else [])]:
        device = device_of(variant, options.cuda and variant != "c")
        for sizes in ((16, 32, 128), (3, 17, 5)):
            expected = values("py", device, *sizes)
            for name, got, wanted in zip(NAMES, values(variant, device, *sizes), expected, strict=True):
                if not torch.allclose(got, wanted, rtol=1e-11, atol=1e-11):
                    raise SystemExit(f"{variant} on {device}: {name} is off by up to {(got - wanted).abs().max().item():.1e}")
        print(f"{variant} on {device}: equal to Python, forward and backward")


if __name__ == "__main__":
    main()
