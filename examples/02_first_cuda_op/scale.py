"""The first CUDA op: scale.cu here becomes torch.ops.demo.scale. Without a GPU, it is only built."""

import torch

import opjit


# begin: declare
@opjit.op("demo::scale(Tensor x, float a) -> Tensor")
def scale(x: torch.Tensor, a: float) -> torch.Tensor:
    # the fake kernel: shape, dtype and device
    return torch.empty_like(x, memory_format=torch.contiguous_format)
# end: declare


def main() -> None:
    if not torch.cuda.is_available():
        print(opjit.build_library("demo::scale", build_directory="build", arch="sm_90"))
        return
    # begin: use
    x = torch.arange(4.0, device="cuda")
    y = torch.ops.demo.scale(x, 2.5)  # the first call compiles scale.cu
    # end: use
    print(y)


if __name__ == "__main__":
    main()
