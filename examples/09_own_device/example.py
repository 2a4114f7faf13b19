"""opjit's add_custom, with autograd and torch.compile, on a device that opjit does not support. Run it: python example.py"""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import toy_device
import toy_module

import opjit
from opjit.backends import DeviceCompiler, Flags, Stream
from opjit.backends.cpu import GLUE, NEEDED, Cpu

HERE = Path(__file__).resolve().parent


# begin: backend
class Toy(Cpu):
    """The backend of the device. It inherits everything else from the CPU's."""

    name = toy_device.NAME  # kernels are named <op>_toy
    device_type = toy_device.NAME
    dispatch_key = "PrivateUse1"
    suffix = ".toy"
    kernels: Path | None = HERE / "kernels"  # for opjit's add_custom: opjit/add_custom.toy
    stream: Stream | None = Stream("toy_stream_t", "toy.h", "toy_current_stream", "toy_exchange_device", "toy_malloc", "toy_free")
    compiler: DeviceCompiler | None = DeviceCompiler(str(HERE / "sdk/toycc"), "install the Toy SDK")

    def archs(self) -> list[str]:
        return ["toy1"]

    def host_arch(self) -> str:
        return "toy1"

    def flags(self, arch: str, runtime: str) -> Flags:
        glue = ("-x", "c", "-std=gnu11", "-O2", *GLUE)
        kernel = ("-O2", "-fPIC", "-fvisibility=hidden", "-ffile-prefix-map={staging}/=", "-ffile-prefix-map={folder}/=", "-I{path}",
                  "-c", "{source}", "-o", "{object}")
        return Flags(glue, (), (toy_module.library(),), ("libtorch_cpu",), NEEDED, include=(str(HERE / "sdk"),), device=kernel)
# end: backend


# begin: graph
CONVERTERS = {torch.ops.opjit.add_custom.default: "ToyAdd", operator.mul: "ToyMul"}


def to_toy_graph(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """The place of a vendor's graph compiler, which converts torch's graph. Here it only names the nodes, and torch runs them."""
    print("graph:", *(CONVERTERS[node.target] for node in module.graph.nodes if node.op == "call_function"))
    return module.forward
# end: graph


def main() -> None:
    installed = toy_device.install()  # torch's part, which a vendor's package does at import
    opjit.register_backend(Toy())  # opjit's part
    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    y = torch.tensor([1.0, 2.0, 3.0])
    on_cpu = [x.clone().requires_grad_(), y.clone().requires_grad_()]
    on_toy = [x.toy().requires_grad_(), y.toy().requires_grad_()]
    mine = toy_module.new_stream()

    with toy_module.stream(mine):
        result = torch.ops.opjit.add_custom(*on_toy)  # the first call compiles add_custom.toy
    (result * result).sum().backward()
    (torch.add(*on_cpu) ** 2).sum().backward()

    print(result)
    print("gradient of y:", on_toy[1].grad)
    print("kernels launched on the stream:", mine.launches)
    assert result.device.type == "toy"
    torch.testing.assert_close(result.cpu(), torch.add(*on_cpu))
    for toys, expected in zip(on_toy, on_cpu, strict=True):
        assert toys.grad is not None
        assert toys.grad.device.type == "toy"
        torch.testing.assert_close(toys.grad.cpu(), expected.grad)
    add_custom = opjit.get("add_custom", "toy")
    print("the same as torch.add on the CPU")

    doubled = torch.compile(lambda a, b: add_custom(a, b) * 2, backend=to_toy_graph, fullgraph=True)
    torch.testing.assert_close(doubled(x.toy(), y.toy()).cpu(), (x + y) * 2)

    torch.manual_seed(0)
    first = torch.randn(3, device="toy")
    torch.manual_seed(0)
    assert torch.equal(first.cpu(), torch.randn(3, device="toy").cpu())
    with torch.autocast("toy", dtype=torch.bfloat16):
        print("a product under autocast:", torch.mm(x.toy(), x.toy().t()).dtype)
    del installed


if __name__ == "__main__":
    main()
