"""A digest covers each value that decides what a function returns, and nothing else."""

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from opjit.operators.code_digest import digest


def made(text: str, **values: Any) -> Callable[..., Any]:
    """A function named `fake` of a text, whose globals are `values`."""
    names = {"torch": torch, "functools": functools, "__name__": "some_cell", **values}
    exec(text, names)
    fake: Callable[..., Any] = names["fake"]
    assert callable(fake)
    return fake


def same(one: Any, other: Any) -> bool:
    return digest(one) == digest(other)


def test_a_digest_does_not_depend_on_lines_files_or_comments() -> None:
    text = "def fake(x, n=2):\n    return x.new_empty(x.numel() * n)\n"
    assert same(made(text), made("\n\n# moved\n" + text.replace("return", "return  ")))


def test_a_digest_depends_on_code_defaults_closures_and_globals() -> None:
    plain = "def fake(x):\n    return size(x)\ndef size(x):\n    return x.numel() * TIMES\n"
    closed = "def outer(n):\n    return lambda x: x.numel() * n\nfake = outer(TIMES)\n"
    wrapped = "@functools.lru_cache\ndef fake(x):\n    return x * TIMES\n"
    partly = "fake = functools.partial(lambda n, x: x * n, TIMES)\n"
    guarded = "@torch.no_grad()\ndef fake(x):\n    return x * TIMES\n"
    of_class = (
        "class Rule:\n    n = TIMES\nclass Other(Rule):\n    pass\nfake = lambda x: Other().n\n"
    )
    bound = "class Rule:\n    def of(self, x):\n        return TIMES\nfake = Rule().of\n"
    for text in (plain, closed, wrapped, partly, guarded, of_class, bound):
        assert same(made(text, TIMES=2), made(text, TIMES=2)), text
        assert not same(made(text, TIMES=2), made(text, TIMES=3)), text
    assert not same(made("fake = lambda x, n=2: n"), made("fake = lambda x, n=3: n"))
    assert not same(made("fake = lambda x: {1, 2}"), made("fake = lambda x: {1, 3}"))


def test_a_digest_depends_on_each_value_of_a_module_that_is_read() -> None:
    def shapes(rows: int, columns: int, unread: int) -> types.ModuleType:
        module = types.ModuleType("some_shapes")
        vars(module).update(rows=rows, columns=columns, unread=unread, itself=module)
        return module

    text = "def fake(x):\n    return shapes.rows, width(x)\ndef width(x):\n    return shapes.columns, shapes.itself.rows\n"
    fake = made(text, shapes=shapes(1, 2, 3))
    assert same(fake, made(text, shapes=shapes(1, 2, 4)))
    assert not same(fake, made(text, shapes=shapes(5, 2, 3)))
    assert not same(fake, made(text, shapes=shapes(1, 5, 3)))


def test_a_value_without_a_digest_is_named_and_stands_for_itself() -> None:
    lock = threading.Lock()
    text = "fake = lambda x: (VALUE, x)"
    for value in (lock, torch.ones(2)):
        found = digest(made(text, VALUE=value))
        assert found == digest(made(text, VALUE=value))
        assert [name.rpartition(".")[2] for name in found[1]] == [type(value).__name__]
    assert not same(made(text, VALUE=lock), made(text, VALUE=threading.Lock()))


def test_values_of_torch_have_digests() -> None:
    text = "fake = lambda x: x.to(VALUE)"
    values = [torch.float32, torch.device("cpu"), torch.ops.aten.add.Tensor, torch.Size([1])]
    found = [digest(made(text, VALUE=value)) for value in (*values, torch.Tag.pointwise, torch.sum)]
    assert [unknown for _, unknown in found] == [[]] * 6
    assert len({text for text, _ in found}) == 6
