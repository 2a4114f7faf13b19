"""A `Generator?` in a schema: the kernel's numbers follow torch's seeds and states, as those of torch's own ops do."""

from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

import opjit
from opjit.ahead import plan
from opjit.declare import oplist
from opjit.errors import DeclarationError, SchemaError
from opjit.wanted import target_of
from tests.helpers import fresh, op_py, write_op
from tests.tensors import COMPILES

NOISE = (
    '#include "opjit_random.h"\n'
    "opjit_status {}_cpu(const opjit_tensor *x, const uint64_t *seed, opjit_tensor *out)\n"
    "{{\n"
    "    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));\n"
    "    for (int64_t i = 0; i < x->numel; i++)\n"
    "        ((float *)out->data)[i] = opjit_uniform(opjit_philox(*seed, (uint64_t)i, 0).word[0]);\n"
    "    return OPJIT_OK;\n"
    "}}\n"
)
X = torch.zeros(5)


def noise(name: str = "noise") -> opjit.Op:
    op = opjit.inline(
        f"generators::{name}(Tensor x, *, Generator? generator=None) -> Tensor",
        like="x",
        c=NOISE.format(name),
    )

    @op.backward
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad

    return op


@pytest.mark.torch
def test_a_seed_decides_the_numbers_and_each_call_draws_others() -> None:
    op = noise()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = op(X)
    with torch.random.fork_rng():
        inside = op(X)
    second = op(X)
    torch.set_rng_state(state)
    with torch.inference_mode():
        again = op(X)
    own = torch.Generator().manual_seed(1)
    state = torch.get_rng_state()
    assert torch.equal(again, first)
    assert torch.equal(inside, second)
    assert not torch.equal(first, second)
    if torch.__version__ >= "2.13":
        assert [op(X, generator=own).tolist(), op(X, generator=own).tolist()] == [
            first.tolist(),
            second.tolist(),
        ]
    assert torch.equal(torch.get_rng_state(), state), (
        "a generator of one's own leaves the default one alone"
    )


@pytest.mark.slow
@pytest.mark.torch
@COMPILES
def test_compiled_and_recomputed_calls_draw_as_eager_ones_do() -> None:
    op = noise()
    leaf = X.clone().requires_grad_()
    torch.manual_seed(1)
    expected = [op(X), op(X)]

    def step(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = op.overload(x)
        return x * made

    def recomputed(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = checkpoint(step, x, use_reentrant=False)
        return made

    compiled = [
        torch.compile(each, fullgraph=True, backend="aot_eager_decomp_partition")
        for each in (step, recomputed)
    ]
    for call in (step, recomputed, *compiled):
        torch.manual_seed(1)
        for wanted in expected:
            leaf.grad = None
            call(leaf).sum().backward()
            # At x = 0, the gradient is the noise of the forward.
            torch.testing.assert_close(leaf.grad, wanted)


def test_vmap_asks_for_numbers_that_differ() -> None:
    op = noise()
    batch = torch.zeros(2, 5)
    with pytest.raises(
        RuntimeError,
        match=r"called random operation generators::noise with randomness='error'.*randomness='different'",
    ):
        torch.vmap(op)(batch)
    rows = torch.vmap(op, randomness="different")(batch)
    assert not torch.equal(rows[0], rows[1])


def test_what_cannot_be_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        SchemaError,
        match=r"argument `g` is a Generator; let it be None.*`Generator\? generator=None`",
    ):
        opjit.inline("generators::needs(Tensor x, Generator g) -> Tensor", c="")
    with pytest.raises(
        DeclarationError,
        match=r"tags is a list of members of torch\.Tag, such as .*, not \['pointwise'\]",
    ):
        opjit.op("generators::named(Tensor x) -> Tensor", tags=["pointwise"])  # type: ignore[list-item]
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1"))
    older = noise("older")
    assert older(X).shape == X.shape
    with pytest.raises(
        NotImplementedError,
        match=r"a generator with torch 2\.13 or later, but this is torch 2\.12\.1; omit it",
    ):
        older(X, generator=torch.Generator())


@pytest.mark.slow
def test_a_complete_library_sets_the_tags_of_the_declaration(tmp_path: Path) -> None:
    declared = op_py(
        "generators::tagged(Tensor x, Generator? generator=None) -> Tensor",
        ", tags=[torch.Tag.needs_fixed_stride_order]",
    )
    folder = write_op(tmp_path / "tagged", op_py=declared, tagged_c=NOISE.format("tagged"))
    [op] = opjit.add_path(folder)
    expected = {
        torch.Tag.needs_fixed_stride_order,
        torch.Tag.nondeterministic_seeded,
        torch.Tag.pt2_compliant_tag,
    }
    assert set(op.overload.tags) == expected
    library = opjit.build_library("generators::tagged", tmp_path / "build", "cpu")
    found = fresh(
        f"import ctypes, torch\nassert ctypes.CDLL({str(library)!r}).opjit_define() == 0\n"
        "print(sorted(tag.name for tag in torch.ops.generators.tagged.default.tags))"
    )
    assert found.stdout.strip() == str(sorted(tag.name for tag in expected))
    recorded = oplist.parse_op(oplist._recorded(op, target_of("cpu", None)).fields())
    assert plan._op_in_folder(recorded).schema == op.schema
