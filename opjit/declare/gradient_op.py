"""A gradient that is another op: its arguments and results are matched by name with the op that it differentiates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opjit.errors import DeclarationError
from opjit.recipe.schema import Argument, Schema, c_names, spelled
from opjit.tensors import tensors_of


@dataclass(frozen=True)
class GradientOp:
    """The backward of an op, as another op. kernels_c/opjit_autograd.cpp has the same in C++.

    Attributes:
        of: the op that it differentiates.
        schema: the op that computes the gradients.
        places: for each argument of `schema`, its place among the arguments of `of`, the results, the gradients of the results, and the
            mask that tells which gradients are needed.
        targets: for each result of `schema`, the argument of `of` that it is the gradient of.
    """

    of: Schema
    schema: Schema
    places: tuple[int, ...]
    targets: tuple[int, ...]

    @property
    def overload(self) -> Any:
        """Return the torch operator, which a reload can replace."""
        return getattr(getattr(torch.ops, self.schema.namespace), self.schema.name).default

    def save(
        self,
        ctx: Any,
        inputs: Sequence[Any],
        output: Any,
        keyword_only_inputs: Mapping[str, Any] = {},
    ) -> None:
        """Keep the arguments and results that the gradient needs, like torch.library.register_autograd's ``setup_context``."""
        results = output if isinstance(output, tuple) else (output,)
        values = [*inputs, *keyword_only_inputs.values(), *results]  # torch's are in order
        kept = [values[place] if place < len(values) else None for place in self.places]
        tensors = [each if isinstance(each, torch.Tensor) else None for each in kept]
        ctx.save_for_backward(*tensors)
        ctx.gradient = self
        pairs = zip(kept, tensors, strict=True)
        ctx.numbers = [each if tensor is None else None for each, tensor in pairs]
        gradients = enumerate(results, len(values))
        constants = [each for place, each in gradients if place not in self.places]
        ctx.mark_non_differentiable(*tensors_of(constants))

    def __call__(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Compute the gradients, like torch.library.register_autograd's ``backward``."""
        if ctx.gradient != self:
            raise RuntimeError(
                f"{self.schema.qualified} has another schema than when its call was recorded; call {self.of.qualified} again"
            )
        needed = dict(enumerate(ctx.needs_input_grad))  # torch drops arguments that equal defaults
        mask = [needed.get(target, False) for target in self.targets]
        computed = [*grads, mask]
        first = len(self.of.arguments) + len(self.of.results)
        values = []
        for place, tensor, number in zip(self.places, ctx.saved_tensors, ctx.numbers, strict=True):
            saved = number if tensor is None else tensor
            values.append(saved if place < first else computed[place - first])
        found = self.overload(*values)
        gradients = found if isinstance(found, tuple) else (found,)
        wanted = dict(zip(self.targets, gradients, strict=True))
        return tuple(wanted.get(place) if needs else None for place, needs in needed.items())


def match(of: Schema, schema: Schema) -> GradientOp:
    """Match the arguments and results of a gradient with the op that it differentiates. Raises DeclarationError if one has no match."""
    names = c_names(of)[len(of.arguments) :]
    values = [*of.arguments]
    gradients = []
    for name, result in zip(names, of.results, strict=True):
        values.append(Argument(name, *result[1:]))
        gradients.append(
            Argument(f"grad_{name}", "Tensor", result.optional or result.kind != "Tensor")
        )
    if len(gradients) == 1 and "grad" not in [each.name for each in values]:
        gradients = [gradients[0]._replace(name="grad")]
    offered = [*values, *gradients, Argument("output_mask", "bool", list=True)]  # torch's name
    places = [_place(each, offered) for each in schema.arguments]
    positions = enumerate(of.arguments)
    targets = {f"grad_{each.name}": place for place, each in positions if each.kind == "Tensor"}
    returned = [each.name for each in schema.results]
    if not any(returned) and len(returned) == len(targets):
        returned = [*targets]
    matched = {*returned} & targets.keys()
    problem = ""
    if of.has_tensor_list or schema.has_tensor_list or schema.mutates:
        problem = (
            "expected no list of tensors and no written argument; write the backward in Python"
        )
    elif -1 in places or max(places) < len(values):
        expected = ", ".join(map(spelled, offered))
        got = ", ".join(map(spelled, schema.arguments))
        problem = f"expected arguments among ({expected}), at least one of them a gradient, got ({got}); change names or types"
    elif len(matched) < len(returned) or {each.kind for each in schema.results} != {"Tensor"}:
        expected = ", ".join(f"Tensor {name}" for name in targets)
        problem = f"expected results among ({expected}), got {schema.text.rpartition('-> ')[2]}; name each result"
    if problem:
        raise DeclarationError(f"{schema.qualified} as the backward of {of.text}: {problem}")
    return GradientOp(of, schema, tuple(places), tuple(targets[name] for name in returned))


def _place(argument: Argument, offered: Sequence[Argument]) -> int:
    """Return the place of the first value with an argument's name, if the argument accepts its type, otherwise -1."""
    for place, each in enumerate(offered):
        if each.name == argument.name:
            same = each._replace(optional=argument.optional, keyword_only=False) == argument
            return place if same and argument.optional >= each.optional else -1
    return -1
