"""opjit's add_custom, with autograd, on a device that opjit has never heard of. Run it: python example.py"""

from __future__ import annotations

from pathlib import Path

import torch
import toy_device

import opjit
from opjit.backends.cpu import Cpu


# begin: backend
class Toy(Cpu):
    """What opjit has to know of the device. It computes with the host's CPU, so compiler flags and archs are the CPU's."""

    name = toy_device.NAME  # kernels are named <op>_toy
    device_type = toy_device.NAME
    dispatch_key = "PrivateUse1"
    suffix = ".toy.c"
    kernels: Path | None = Path(__file__).resolve().parent / "kernels"  # for opjit's add_custom: opjit/add_custom.toy.c
# end: backend


def main() -> None:
    installed = toy_device.install()  # torch's part, which a vendor's package does at import
    opjit.register_backend(Toy())  # opjit's part
    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    y = torch.tensor([1.0, 2.0, 3.0])
    on_cpu = [x.clone().requires_grad_(), y.clone().requires_grad_()]
    on_toy = [x.to("toy").requires_grad_(), y.to("toy").requires_grad_()]

    result = torch.ops.opjit.add_custom(*on_toy)  # the first call compiles add_custom.toy.c
    (result * result).sum().backward()
    (torch.add(*on_cpu) ** 2).sum().backward()

    print(result)
    print("gradient of y:", on_toy[1].grad)
    assert result.device.type == "toy"
    torch.testing.assert_close(result.cpu(), torch.add(*on_cpu))
    for mine, expected in zip(on_toy, on_cpu, strict=True):
        assert mine.grad is not None
        assert mine.grad.device.type == "toy"
        torch.testing.assert_close(mine.grad.cpu(), expected.grad)
    assert opjit.get("add_custom", "toy") is torch.ops.opjit.add_custom.default
    print("the same as torch.add on the CPU")
    del installed


if __name__ == "__main__":
    main()
