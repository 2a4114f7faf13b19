"""The generated glue: what arrives in C, what comes back, what is refused, and that nothing leaks."""

import json
import math
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from opjit import Op, backends, request
from opjit.backends import targets
from opjit.errors import CompileError, NoKernel
from tests.helpers import Growth, MakeOp
from tests.tensors import COMPLEX, REAL

FULL: dict[str, Any] = {
    "x": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "maybe": torch.tensor([1.5]),
    "xs": [torch.tensor([1.0, 2.0]), torch.tensor(3.0), torch.empty(0, 2)],
    "n": -(2**63),
    "sym": 2**62 + 1,
    "f": math.pi,
    "b": True,
    "s": "smörgås 日本 😀",
    "d": torch.bfloat16,
    "on": 2**63 - 1,
    "osym": 0,
    "of": -0.0,
    "ob": False,
    "os": "",
    "od": torch.bool,
    "ns": [1, -2, 2**40],
    "syms": [7],
    "fs": [0.1, 1e300, 5e-324],
    "bs": [True, False, True],
    "pair": [8, 9],
    "twins": [torch.tensor([4.0]), torch.tensor([5.0])],
    "oxs": [torch.tensor([6.0])],
    "ons": [3],
    "ofs": [2.5],
    "obs": [False],
    "opair": [1, 2],
}
EMPTY: dict[str, Any] = {
    "x": torch.tensor(1.0),
    "maybe": None,
    "xs": [],
    "n": 0,
    "sym": 0,
    "f": 0.0,
    "b": False,
    "s": "",
    "d": torch.float32,
    "on": None,
    "osym": None,
    "of": None,
    "ob": None,
    "os": None,
    "od": None,
    "ns": [],
    "syms": [],
    "fs": [],
    "bs": [],
    "pair": [0, 0],
    "twins": [torch.tensor(0.0), torch.tensor(0.0)],
    "oxs": None,
    "ons": None,
    "ofs": None,
    "obs": None,
    "opair": None,
}


def _expected(name: str, value: Any) -> Any:
    """What the op reports for a value that was passed."""
    if isinstance(value, torch.Tensor):
        return {
            "dtype": str(value.dtype).removeprefix("torch."),
            "numel": value.numel(),
            "dim": value.dim(),
            "contiguous": value.is_contiguous(),
            "device_index": -1,
            "sizes": list(value.shape),
            "strides": list(value.stride()),
            "values": value.flatten().tolist() if value.dtype == torch.float32 else [],
        }
    if isinstance(value, list):
        return [_expected(name, item) for item in value]
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, str):
        return value.encode().hex()
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value


def _report(tensor: torch.Tensor) -> dict[str, Any]:
    found = json.loads(bytes(tensor.tolist()).decode("ascii"))
    assert isinstance(found, dict)
    return found


@pytest.mark.torch
@pytest.mark.parametrize("values", [FULL, EMPTY], ids=["full", "none"])
def test_every_type_arrives_as_it_was_passed(everything: Op, values: dict[str, Any]) -> None:
    report = _report(everything(*values.values())[0])
    assert report.pop("last") == 7, "a default"
    assert list(report) == list(values)
    for name, value in values.items():
        assert report[name] == _expected(name, value), name
    assert _report(everything(*values.values(), last=-1)[0])["last"] == -1
    assert _report(everything(*{**values, "pair": 5}.values())[0])["pair"] == [5, 5], (
        "one int for all"
    )


def test_infinities_and_nan_pass_through(make_op: MakeOp) -> None:
    op = make_op(
        "same(Tensor x, float a, float? b, float[] c) -> (float, float, float)",
        """
        opjit_status same_cpu(const opjit_tensor *x, double a, const double *b, const opjit_floats *c, double *p, double *q, double *r)
        {
            (void)x;
            *p = a, *q = *b, *r = c->data[0];
            return OPJIT_OK;
        }
        """,
    )
    for number in (math.inf, -math.inf, math.nan):
        assert [struct.pack("d", got) for got in op(torch.ones(1), number, number, [number])] == [
            struct.pack("d", number)
        ] * 3


@pytest.mark.torch
def test_every_kind_of_result_comes_back(everything: Op) -> None:
    values = {**FULL, "n": -(2**61), "f": 1.25}
    _, n2, f2, nb, copy = everything(*values.values())
    assert (n2, f2, nb) == (-(2**62), 2.5, False)
    assert [type(n2), type(f2), type(nb)] == [int, float, bool]
    assert torch.equal(copy, values["x"])
    assert everything(*EMPTY.values())[1:4] == (0, 0.0, True)


@pytest.mark.torch
@pytest.mark.parametrize(
    "x",
    [
        torch.tensor(2.0),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(24.0).reshape(4, 6)[1::2, 1:5:3],
        torch.arange(3.0).expand(4, 3),
        torch.empty(0),
        torch.empty(3, 0, 2).transpose(0, 2),
        torch.ones(2, 1, 3).as_strided((2, 1, 3), (3, 77, 1)),
        torch.arange(10.0)[5:],
        torch.ones((1,) * 64),
    ],
    ids=[
        "0-d",
        "permuted",
        "sliced",
        "expanded",
        "empty",
        "empty-transposed",
        "odd-stride",
        "offset",
        "64-d",
    ],
)
def test_views_arrive_with_their_layout(everything: Op, x: torch.Tensor) -> None:
    report, *_, copy = everything(*{**EMPTY, "x": x, "maybe": x, "xs": [x, x]}.values())
    found = _report(report)
    assert found["x"] == found["maybe"] == found["xs"][0] == found["xs"][1] == _expected("x", x)
    assert torch.equal(copy, x)
    assert copy.stride() == torch.empty_like(x).stride()


@pytest.mark.torch
@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX])
def test_every_dtype_arrives_and_returns(everything: Op, dtype: torch.dtype) -> None:
    x = torch.tensor([[1, 0, 3]]).to(dtype)
    report, *_, copy = everything(*{**EMPTY, "x": x, "d": dtype, "od": dtype}.values())
    found = _report(report)
    assert found["x"]["dtype"] == found["d"] == found["od"] == str(dtype).removeprefix("torch.")
    assert copy.dtype == dtype
    assert torch.equal(copy, x)


@pytest.mark.torch
def test_a_dtype_that_c_has_no_name_for_is_seen_as_such(everything: Op) -> None:
    found = _report(
        everything(
            *{
                **FULL,
                "d": torch.float8_e5m2fnuz,
                "maybe": torch.ones(2).to(torch.float8_e4m3fnuz),
            }.values()
        )[0]
    )
    assert found["d"] == found["maybe"]["dtype"] == "an unsupported dtype"


# Writing ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_a_written_argument_is_written_and_its_version_counts_one(increment: Op) -> None:
    for x in (
        torch.zeros(3),
        torch.zeros(4, 4).t()[1:, ::2],
        torch.zeros(2, 2, dtype=torch.int64),
        torch.zeros(0),
        torch.tensor(0.0),
    ):
        version = x._version
        assert increment(x) is None
        assert torch.equal(x, torch.ones_like(x))
        assert x._version == version + 1


@pytest.mark.torch
def test_a_view_and_its_base_share_the_version_and_reading_does_not_count(
    increment: Op, double: Op
) -> None:
    base = torch.zeros(4)
    increment(base[1:3])
    double(base)
    assert (base.tolist(), base._version) == ([0, 1, 1, 0], 1)


MANY = """
    static void add(opjit_tensor *x, float value) { ((float *)x->data)[0] += value; }
    opjit_status many_cpu(opjit_tensor *x, opjit_tensor *y, const opjit_tensors *zs, const opjit_tensors *more, const opjit_tensor *r)
    {
        add(x, ((const float *)r->data)[0]);
        if (y)
            add(y, 2);
        for (int64_t i = 0; i < zs->len; i++)
            ((float *)zs->data[i].data)[0] += 3;
        for (int64_t i = 0; more && i < more->len; i++)
            ((float *)more->data[i].data)[0] += 4;
        OPJIT_CHECK(((const float *)r->data)[0] >= 0, "failed after writing");
        return OPJIT_OK;
    }
    """


@pytest.mark.torch
def test_optional_and_listed_arguments_are_written(make_op: MakeOp) -> None:
    op = make_op(
        "many(Tensor(a!) x, Tensor(b!)? y, Tensor(c!)[] zs, Tensor(d!)[]? more, Tensor r) -> ()",
        MANY,
    )
    x, y, z0, z1, m, r = (torch.zeros(1) for _ in range(6))
    op(x, y, [z0, z1], [m], r)
    assert [t.item() for t in (x, y, z0, z1, m)] == [0, 2, 3, 3, 4]
    assert [t._version for t in (x, y, z0, z1, m, r)] == [1, 1, 1, 1, 1, 0]
    op(x, None, [], None, r)
    assert [t._version for t in (x, y, z0, z1, m, r)] == [2, 1, 1, 1, 1, 0]


@pytest.mark.torch
def test_autograd_refuses_a_tensor_that_it_saved_and_an_op_wrote_in_a_list(make_op: MakeOp) -> None:
    w = torch.ones(3, requires_grad=True)
    x = torch.full((3,), 2.0)
    loss = (w * x).sum()  # saves x
    many = make_op(
        "many(Tensor(a!) x, Tensor(b!)? y, Tensor(c!)[] zs, Tensor(d!)[]? more, Tensor r) -> ()",
        MANY,
    )
    many(torch.zeros(1), None, [x], None, torch.zeros(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(loss)


@pytest.mark.torch
def test_a_lazy_clone_is_not_written_through_nor_copied_to_be_read(
    increment: Op, double: Op
) -> None:
    base = torch.zeros(3)
    clone = torch._lazy_clone(base)
    assert double(clone).tolist() == [0, 0, 0]
    assert torch._C._is_cow_tensor(clone)  # type: ignore[attr-defined]
    increment(clone)
    assert base.tolist() == [0, 0, 0]
    assert clone.tolist() == [1, 1, 1]
    second = torch._lazy_clone(base)
    increment(base)
    assert (base.tolist(), second.tolist()) == ([1, 1, 1], [0, 0, 0])


@pytest.mark.torch
def test_inference_tensors_are_written_in_inference_mode(increment: Op, double: Op) -> None:
    with torch.inference_mode():
        x = torch.zeros(3)
        increment(x)
        assert x.tolist() == [1, 1, 1]
        assert double(x).is_inference()
        increment(normal := torch.zeros(1))
    assert normal.item() == 1
    outside = torch.zeros(2)
    with torch.inference_mode():
        increment(outside)
    assert outside.tolist() == [1, 1]


@pytest.mark.torch
def test_conjugate_and_negative_views_are_resolved(
    make_op: MakeOp, double: Op, increment: Op
) -> None:
    op = make_op(
        "parts(Tensor z) -> Tensor",
        """
        opjit_status parts_cpu(const opjit_tensor *z, opjit_tensor *out)
        {
            OPJIT_CHECK(z->dtype == OPJIT_COMPLEX64 && z->contiguous, "a contiguous complex64");
            OPJIT_TRY(opjit_empty(out, 1, (int64_t[]){2 * z->numel}, OPJIT_FLOAT32, z));
            memcpy(out->data, z->data, (size_t)out->numel * sizeof(float));
            return OPJIT_OK;
        }
        """,
    )
    z = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    assert op(z.conj()).tolist() == [1, -2, 3, 4]
    assert double(torch._neg_view(torch.tensor([1.0, -2.0]))).tolist() == [-2, 4]
    assert double(z.conj().imag).tolist() == [-4, 8]
    negative = torch._neg_view(base := torch.tensor([1.0, 2.0]))
    with pytest.raises(NoKernel, match=r"call \.resolve_conj\(\) or \.resolve_neg\(\)"):
        increment(negative)
    with pytest.raises(NoKernel, match=r"call \.resolve_conj\(\) or \.resolve_neg\(\)"):
        increment(z.conj())
    assert base.tolist() == [1, 2]


# Refusals -----------------------------------------------------------------------------------------------------------------------


RETURN_INPUT = """
    opjit_status same_cpu(const opjit_tensor *x, int64_t how, opjit_tensor *out, opjit_tensor *second)
    {
        if (how >= 2)
            OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
        else
            *out = *x;
        if (how == 2)
            *second = *out;
        else if (how == 3)
            *second = *x;
        else
            OPJIT_TRY(opjit_empty_like(second, x, x->dtype));
        OPJIT_CHECK(how % 2 == 0 || how == 3, "failed with an input in an output");
        return OPJIT_OK;
    }
    """


@pytest.mark.torch
@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            0,
            "the output `out0` is an input or another output.*copy it, or declare the input Tensor",
        ),
        (1, "failed with an input in an output"),
        (2, "the output `out1` is an input or another output"),
        (3, "the output `out1` is an input or another output"),
    ],
)
def test_an_output_is_no_input_and_no_other_output(make_op: MakeOp, how: int, says: str) -> None:
    op = make_op("same(Tensor x, int how) -> (Tensor, Tensor)", RETURN_INPUT)
    x = torch.ones(4)
    for _ in range(50):
        with pytest.raises(RuntimeError, match=says):
            op(x, how)
    assert x.tolist() == [1, 1, 1, 1]
    assert torch.equal(x + 1, torch.full((4,), 2.0)), "the input is still whole"


def test_an_output_is_no_optional_or_listed_input(make_op: MakeOp) -> None:
    op = make_op(
        "same(Tensor x, Tensor[] ys, Tensor? y=None, Tensor[]? more=None) -> Tensor",
        """
        opjit_status same_cpu(const opjit_tensor *x, const opjit_tensors *ys, const opjit_tensor *y, const opjit_tensors *more,
                              opjit_tensor *out)
        {
            if (!y && !ys->len && !more)
                return opjit_empty_like(out, x, x->dtype);
            *out = y ? *y : more ? more->data[0] : ys->data[0];
            return OPJIT_OK;
        }
        """,
    )
    y = torch.ones(2)
    calls: list[tuple[Any, ...]] = [([y],), ([], y), ([], None, [y])]
    for given in calls:
        with pytest.raises(RuntimeError, match="the output `out` is an input"):
            op(torch.ones(1), *given)
    assert op(torch.ones(1), []).shape == (1,)
    assert y.tolist() == [1, 1]


@pytest.mark.torch
@pytest.mark.parametrize(
    "mistake", ["x->data = y->data;", "*x = *y;", "x->numel = 1;", "if (maybe) maybe->dim = 0;"]
)
def test_an_assignment_to_the_fields_of_a_written_argument_is_an_error(
    make_op: MakeOp, mistake: str
) -> None:
    op = make_op(
        "assign(Tensor(a!) x, Tensor(b!)? maybe, Tensor y) -> ()",
        f"""
        opjit_status assign_cpu(opjit_tensor *x, opjit_tensor *maybe, const opjit_tensor *y)
        {{
            if (y->dim == 2)
                {{ {mistake} }}
            return OPJIT_OK;
        }}
        """,
    )
    x = torch.zeros(2)
    op(x, None, torch.ones(2))
    op(x, torch.zeros(3), torch.ones(2))
    name = "maybe" if "maybe" in mistake else "x"
    with pytest.raises(RuntimeError, match=f"assigned to the fields of `{name}`.*`{name}->data`"):
        op(x, torch.zeros(3), torch.ones(2, 2))
    assert x.tolist() == [0, 0]


def test_an_output_that_was_not_made_is_an_error(make_op: MakeOp) -> None:
    op = make_op(
        "lazy(Tensor x, bool first) -> (Tensor done, Tensor missing)",
        """
        opjit_status lazy_cpu(const opjit_tensor *x, bool first, opjit_tensor *done, opjit_tensor *missing)
        {
            (void)missing;
            return first ? opjit_empty(done, 0, NULL, x->dtype, x) : OPJIT_OK;
        }
        """,
    )
    with pytest.raises(RuntimeError, match="OPJIT_OK but did not make the output `missing`"):
        op(torch.ones(1), True)
    with pytest.raises(RuntimeError, match="OPJIT_OK but did not make the output `done`"):
        op(torch.ones(1), False)


def test_outputs_and_scratch_that_cannot_be_are_errors(make_op: MakeOp) -> None:
    says = {
        "opjit_empty(out, 65, sizes, x->dtype, x)": "0 to 64 dimensions, not 65",
        "opjit_empty(out, -1, sizes, x->dtype, x)": "0 to 64 dimensions, not -1",
        "opjit_empty(out, 1, sizes, OPJIT_OTHER_DTYPE, x)": "a dtype that opjit.h names",
        "opjit_empty(out, 1, (int64_t[]){-1}, x->dtype, x)": ".",
        "opjit_empty(out, 1, (int64_t[]){INT64_MAX / 2}, OPJIT_FLOAT64, x)": ".",
        "opjit_scratch(&memory, -1, x)": "scratch of -1 bytes",
        "(opjit_empty(out, 0, NULL, x->dtype, x), opjit_empty_like(out, x, x->dtype))": "already made: make each output once",
    }
    cases = "\n".join(f"if (n == {number}) return {make};" for number, make in enumerate(says))
    op = make_op(
        "bad(Tensor x, int n) -> Tensor",
        f"""
        #pragma GCC diagnostic ignored "-Wunused-result"
        opjit_status bad_cpu(const opjit_tensor *x, int64_t n, opjit_tensor *out)
        {{
            int64_t sizes[70] = {{0}};
            void *memory;
            {cases}
            return OPJIT_OK;
        }}
        """,
    )
    for number, said in enumerate(says.values()):
        with pytest.raises(RuntimeError, match=said):
            op(torch.ones(1), number)


def test_none_for_a_tensor_is_answered_with_tensor_optional(make_op: MakeOp) -> None:
    op = make_op(
        "both(Tensor x, Tensor y) -> Tensor",
        """
        opjit_status both_cpu(const opjit_tensor *x, const opjit_tensor *y, opjit_tensor *out)
        {
            (void)y;
            return opjit_empty_like(out, x, x->dtype);
        }
        """,
    )
    here = torch.ones(2)
    for arguments in ((here, None), (None, here)):
        with pytest.raises(
            RuntimeError,
            match=r"an argument is an undefined tensor; declare it Tensor\? if it may be None",
        ):
            op(*arguments)


BOTH = """
    opjit_status both_DEVICE(const opjit_tensor *x, const opjit_tensor *y, const opjit_tensors *zs, opjit_tensor *outSTREAM)
    {
        (void)y, (void)zs;
        return opjit_empty_like(out, x, x->dtype);
    }
    """


@pytest.mark.parametrize("other", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tensors_on_two_devices_are_refused(make_op: MakeOp, other: str) -> None:
    c = BOTH.replace("DEVICE", "cpu").replace("STREAM", "")
    cuda = BOTH.replace("DEVICE", "cuda").replace("STREAM", ", cudaStream_t stream")
    more: dict[str, Any] = (
        {"fake": lambda x, y, zs: torch.empty_like(x)} if other == "meta" else {"cuda": cuda}
    )
    op = make_op("both(Tensor x, Tensor? y, Tensor[] zs) -> Tensor", c, **more)
    here = torch.ones(2)
    there = torch.ones(2, device=other)
    assert op(here, here, [here, here]).device.type == "cpu"
    assert op(there, None, [there]).device.type == other
    mixed: list[tuple[tuple[Any, ...], str]] = [
        ((here, there, []), "y"),
        ((there, here, []), "y"),
        ((here, None, [here, there]), "zs"),
    ]
    if other == "cuda":
        mixed[2] = ((there, None, [there, here]), "zs")
    for arguments, name in mixed:
        they_are = f"`{name}` is on another one" if other == "cuda" else "they are on cpu and meta"
        with pytest.raises(
            RuntimeError, match=f"expected all tensors on one device, but {they_are}"
        ):
            op(*arguments)


# Errors -------------------------------------------------------------------------------------------------------------------------


def test_an_error_carries_op_text_file_and_line(make_op: MakeOp) -> None:
    op = make_op(
        "fails(Tensor x, int n, str s) -> Tensor",
        """
        opjit_status fails_cpu(const opjit_tensor *x, int64_t n, const char *s, opjit_tensor *out)
        {
            OPJIT_TRY(opjit_empty(out, 0, NULL, x->dtype, x));
            OPJIT_CHECK(n != 1, "n is %lld, and s is %s: 100%%", (long long)n, s);
            OPJIT_FAIL("no way");
        }
        """,
    )
    with pytest.raises(RuntimeError) as caught:
        op(torch.ones(1), 1, "ä%s%n")
    assert type(caught.value) is RuntimeError
    first = str(caught.value).splitlines()[0]
    assert first == f"{op.qualified}: n is 1, and s is ä%s%n: 100% [fails.c:6]"
    assert str(op.folder) not in str(caught.value), "no path of the machine"
    with pytest.raises(RuntimeError, match=re.escape(f"{op.qualified}: no way [fails.c:7]")):
        op(torch.ones(1), 2, "")


def test_a_long_error_text_is_cut_not_overrun(make_op: MakeOp) -> None:
    op = make_op(
        "fails(Tensor x, str s) -> ()",
        """
        opjit_status fails_cpu(const opjit_tensor *x, const char *s) { (void)x; OPJIT_FAIL("%s|end", s); }
        """,
    )
    for length in (1990, 1999, 2000, 100_000):
        with pytest.raises(RuntimeError) as caught:
            op(torch.ones(1), "é" * length)
        assert len(str(caught.value)) < 2600
        assert str(caught.value).endswith("[fails.c:3]")


def test_an_error_text_that_is_no_utf8_still_arrives(make_op: MakeOp) -> None:
    shown = {
        r"\303": "?",
        r"\377\376": "??",
        r"\303\251": "é",
        r"\340\200\200": "???",
        r"\355\240\200": "???",
        r"\364\220\200\200": "????",
        r"\360\237\230\200": "😀",
        r"\342\202": "??",
        r"\300\200": "??",
    }
    texts = ", ".join(f'"a" "{octal}" "z"' for octal in shown)
    op = make_op(
        "fails(Tensor x, int n) -> ()",
        f"""
        static const char *const texts[] = {{{texts}}};
        opjit_status fails_cpu(const opjit_tensor *x, int64_t n) {{ (void)x; OPJIT_FAIL("%s", texts[n]); }}
        """,
    )
    for number, text in enumerate(shown.values()):
        with pytest.raises(RuntimeError, match=re.escape(f": a{text}z [fails.c:4]")):
            op(torch.ones(1), number)


LEAKY = """
    opjit_status leaky_cpu(const opjit_tensor *x, const opjit_tensor *y, const opjit_tensors *zs, const opjit_tensors *more,
                           const char *s, const char *os, const int64_t *n, const double *f, const opjit_ints *ns,
                           const opjit_floats *fs, const opjit_bools *bs, bool fail, opjit_tensor *out, opjit_tensor *second)
    {
        (void)y, (void)zs, (void)more, (void)n, (void)f, (void)ns, (void)fs, (void)bs;
        void *memory;
        OPJIT_TRY(opjit_scratch(&memory, 1000, x));
        OPJIT_TRY(opjit_scratch(&memory, 100000, x));
        OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
        OPJIT_CHECK(!fail, "%s %s", s, os ? os : "");
        return opjit_empty_like(second, x, x->dtype);
    }
    """
LEAKY_SCHEMA = (
    "leaky(Tensor x, Tensor? y, Tensor[] zs, Tensor[]? more, str s, str? os, int? n, float? f, int[] ns, float[]? fs, "
    "bool[] bs, bool fail) -> (Tensor, Tensor)"
)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("fail", [True, False], ids=["raises", "calls"])
def test_memory_stays_flat(make_op: MakeOp, growth: Growth, fail: bool) -> None:
    op = make_op(LEAKY_SCHEMA, LEAKY)
    x = torch.ones(1000)
    arguments = (
        x,
        x,
        [x, x],
        [x],
        "s" * 100,
        "t" * 100,
        1,
        2.0,
        list(range(20)),
        [0.5] * 20,
        [True] * 20,
        fail,
    )
    overload = op.overload

    def call() -> None:
        if not fail:
            overload(*arguments)
            return
        try:
            overload(*arguments)
        except RuntimeError:
            return
        pytest.fail("it did not raise")

    assert growth(call, 100_000) < 8 << 20


def test_scratch_is_aligned_and_separate(make_op: MakeOp) -> None:
    op = make_op(
        "scratch(Tensor x, int[] sizes) -> int",
        """
        opjit_status scratch_cpu(const opjit_tensor *x, const opjit_ints *sizes, int64_t *out)
        {
            void *memory[16];
            OPJIT_CHECK(sizes->len <= 16, "at most 16");
            for (int64_t i = 0; i < sizes->len; i++) {
                OPJIT_TRY(opjit_scratch(&memory[i], sizes->data[i], x));
                OPJIT_CHECK((uintptr_t)memory[i] % 16 == 0, "block %lld is at %p", (long long)i, memory[i]);
                if (sizes->data[i] > 0)
                    memset(memory[i], (int)i + 1, (size_t)sizes->data[i]);
            }
            for (int64_t i = 0; i < sizes->len; i++)
                for (int64_t at = 0; at < sizes->data[i]; at++)
                    OPJIT_CHECK(((unsigned char *)memory[i])[at] == i + 1, "block %lld was overwritten", (long long)i);
            *out = sizes->len;
            return OPJIT_OK;
        }
        """,
    )
    assert op(torch.ones(1), [0, 1, 15, 16, 17, 4096, 1_000_000, 0, 3]) == 9


# Threads ------------------------------------------------------------------------------------------------------------------------


PARALLEL = """
    typedef struct job {
        unsigned char *hits;
        int64_t begin, bad, grain;
        bool nested;
    } job;

    static opjit_status inner(int64_t begin, int64_t end, void *context)
    {
        job *j = (job *)context;
        for (int64_t i = begin; i < end; i++)
            j->hits[i - j->begin]++;
        return OPJIT_OK;
    }

    static opjit_status outer(int64_t begin, int64_t end, void *context)
    {
        job *j = (job *)context;
        OPJIT_CHECK(j->bad < begin || j->bad >= end, "item %lld is bad", (long long)j->bad);
        return j->nested ? opjit_parallel_for(begin, end, 1, inner, j) : inner(begin, end, j);
    }

    opjit_status cover_cpu(const opjit_tensor *x, int64_t begin, int64_t end, int64_t grain, bool nested, int64_t bad, opjit_tensor *out)
    {
        int64_t size = end > begin ? end - begin : 0;
        OPJIT_TRY(opjit_empty(out, 1, &size, OPJIT_UINT8, x));
        if (size)
            memset(out->data, 0, (size_t)size);
        job j = {(unsigned char *)out->data, begin, bad, grain, nested};
        return opjit_parallel_for(begin, end, grain, outer, &j);
    }
    """


@pytest.fixture
def cover(make_op: MakeOp) -> Op:
    return make_op(
        "cover(Tensor x, int begin, int end, int grain, bool nested=False, int bad=-1000) -> Tensor",
        PARALLEL,
    )


@pytest.fixture
def four_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.torch
@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("grain", [1, 3, 100, 10**9])
def test_parallel_for_covers_the_range_once(cover: Op, grain: int, nested: bool) -> None:
    x = torch.ones(1)
    for begin, end in ((0, 0), (5, 3), (0, 1), (0, 1000), (-7, 12), (10**12, 10**12 + 101)):
        hits = cover(x, begin, end, grain, nested)
        assert hits.tolist() == [1] * max(0, end - begin)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("nested", [False, True])
def test_an_error_in_a_worker_comes_out(cover: Op, nested: bool) -> None:
    x = torch.ones(1)
    for bad in (0, 499, 999):  # 999 is never in the caller's part
        for _ in range(20):
            with pytest.raises(RuntimeError, match=rf"item {bad} is bad \[cover\.c:\d+\]"):
                cover(x, 0, 1000, 1, nested, bad)
    assert cover(x, 0, 1000, 1, nested).sum() == 1000


@pytest.mark.usefixtures("four_threads")
def test_of_many_errors_one_comes_out_and_none_leaks(make_op: MakeOp, growth: Growth) -> None:
    op = make_op(
        "all_fail(Tensor x) -> ()",
        """
        static opjit_status body(int64_t begin, int64_t end, void *context)
        {
            (void)context;
            OPJIT_FAIL("part %lld to %lld failed", (long long)begin, (long long)end);
        }
        opjit_status all_fail_cpu(const opjit_tensor *x) { (void)x; return opjit_parallel_for(0, 1000, 1, body, NULL); }
        """,
    )
    x = torch.ones(1)

    def call() -> None:
        with pytest.raises(RuntimeError, match=r"part \d+ to \d+ failed"):
            op(x)

    assert growth(call, 1_000) < 4 << 20


def test_calls_from_many_threads_at_once_do_not_wait_for_the_gil(make_op: MakeOp) -> None:
    op = make_op(
        "meet(Tensor(a!) x) -> ()",
        """
        #include <time.h>
        opjit_status meet_cpu(opjit_tensor *x)
        {
            /* Two calls meet here only when both run at once. */
            int64_t *arrived = (int64_t *)x->data;
            __atomic_add_fetch(arrived, 1, __ATOMIC_SEQ_CST);
            for (int i = 0; i < 10000 && __atomic_load_n(arrived, __ATOMIC_SEQ_CST) < 2; i++)
                nanosleep(&(struct timespec){0, 1000000}, NULL);
            OPJIT_CHECK(__atomic_load_n(arrived, __ATOMIC_SEQ_CST) >= 2, "the other thread never came");
            return OPJIT_OK;
        }
        """,
    )
    request.ready(op, backends.for_device("cpu"))
    x = torch.zeros(1, dtype=torch.int64)
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(op, x) for _ in range(2)]:
            future.result()
    assert x.item() == 2


# Signatures ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parameters",
    [
        "const opjit_tensor *x, float a, opjit_tensor *out",
        "const opjit_tensor *x, opjit_tensor *out",
        "opjit_tensor *x, double a, opjit_tensor *out",
        "double a, const opjit_tensor *x, opjit_tensor *out",
        "const opjit_tensor *x, double a, opjit_tensor *out, void *stream",
    ],
)
def test_a_signature_that_is_not_the_schemas_does_not_compile(
    make_op: MakeOp, parameters: str
) -> None:
    op = make_op(
        "scale(Tensor x, float a) -> Tensor",
        f"opjit_status scale_cpu({parameters})\n{{\n    return OPJIT_OK;\n}}\n",
    )
    with pytest.raises(CompileError) as caught:
        op(torch.ones(1), 2.0)
    message = str(caught.value)
    assert "scale.c:2" in message.splitlines()[0]
    assert message.splitlines()[0].endswith(
        ": expected opjit_status scale_cpu(const opjit_tensor *x, double a, opjit_tensor *out), "
        f"found opjit_status scale_cpu({parameters})"
    )


def test_an_authors_functions_and_macros_may_have_any_names_but_opjits(make_op: MakeOp) -> None:
    of_the_glue = ["run", "call", "status", "stack", "num_args", "boxed0", "arg0", "out0", "cell"]
    defined = "\n".join(f"static int {name}(void) {{ return 1; }}" for name in of_the_glue)
    op = make_op(
        "mine(Tensor x, float? a=None) -> int",
        f"""
{defined}
opjit_status mine_cpu(const opjit_tensor *x, const double *a, int64_t *out)
{{
    (void)x, (void)a;
    *out = {" + ".join(f"{name}()" for name in of_the_glue)};
    return OPJIT_OK;
}}
{chr(10).join(f"#define {name} 64" for name in [*of_the_glue, "handle", "device_type"])}
#pragma GCC poison opjit_raise
""",
    )
    assert op(torch.ones(3)) == len(of_the_glue)


@pytest.mark.nvcc
def test_a_cuda_signature_that_is_not_the_schemas_does_not_compile(make_op: MakeOp) -> None:
    op = make_op(
        "scale(Tensor x, float a) -> Tensor",
        cuda="""
        opjit_status scale_cuda(const opjit_tensor *x, int64_t a, opjit_tensor *out, cudaStream_t stream)
        {
            return OPJIT_OK;
        }
        """,
    )
    with pytest.raises(CompileError) as caught:
        request.entry(op, targets.named("sm_90", backends.for_device("cuda"), "13.0"))
    message = str(caught.value)
    first = message.splitlines()[0]
    assert "scale.cu:3:14: error: scale_cuda does not match the schema of" in first
    assert (
        "opjit_status scale_cuda(const opjit_tensor *x, double a, opjit_tensor *out, cudaStream_t stream)"
        in first
    ), "the schema's"
    assert "int64_t" in first, "the author's"
