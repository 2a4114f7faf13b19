"""Draw an index of each row's k largest logits, without a sort: `torch.multinomial` after `torch.topk` and softmax, in one op."""

import torch

import opjit


# begin: declare
@opjit.op("demo::sample_top_k(Tensor logits, int k, float temperature=1.0, *, Generator? generator=None) -> Tensor", differentiable=False)
def sample_top_k(logits: torch.Tensor, k: int, temperature: float = 1.0, *, generator: torch.Generator | None = None) -> torch.Tensor:
    return logits.new_empty(logits.shape[:-1], dtype=torch.int64)
# end: declare
