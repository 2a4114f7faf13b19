"""A transpose with variants, from which opjit chooses: `python examples/16_variants/use.py`."""

from pathlib import Path

import torch

import opjit

opjit.add_path(Path(__file__).parent / "transpose")


def main() -> None:
    # begin: use
    transpose = torch.ops.demo.transpose
    for size in (64, 1024):
        x = torch.rand(size, size)
        assert torch.equal(transpose(x), x.T)  # the first call with these sizes builds and measures, and a later process does neither
        assert torch.equal(torch.compile(transpose, backend="aot_eager", fullgraph=True)(x), x.T)
    # end: use
    print("every variant's transpose is torch's")


if __name__ == "__main__":
    main()
