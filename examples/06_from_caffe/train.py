"""Uses a layer that was ported from Caffe: an autoencoder with a code of zeros and ones.

    python examples/06_from_caffe/train.py [cuda]

Sixteen inputs are squeezed through six bits. The gradient of rounding is zero. The backward of round_ste passes the gradient of its
result through, so that the encoder learns a separate code for each input.
"""

import sys

import torch

import opjit


class Binary(torch.nn.Module):
    """In Caffe, these were two layers of a prototxt: a sigmoid, and rounding."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bits: torch.Tensor = torch.ops.opjit.round_ste(torch.sigmoid(x))
        return bits


def main(device: str) -> None:
    opjit.get("round_ste", device)  # build it now, not in the first step
    torch.manual_seed(0)
    x, wanted = torch.eye(16, device=device), torch.arange(16, device=device)
    encoder = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 6), Binary())
    model = torch.nn.Sequential(encoder, torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(201):
        loss = torch.nn.functional.cross_entropy(model(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}")
    with torch.no_grad():
        codes = encoder(x)
    print("codes:", " ".join("".join(str(int(bit)) for bit in code) for code in codes))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
