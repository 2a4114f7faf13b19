"""The schema table of opjit.h: what is taken, and what is refused when the op is declared."""

import re
from collections.abc import Callable

import pytest
import torch

from opjit import Op, backends, request
from opjit.backends import targets
from opjit.builder import glue
from opjit.errors import DeclarationError, OpjitError, SchemaError
from opjit.recipe.schema import Argument, Result, c_names, parse


@pytest.mark.torch
@pytest.mark.parametrize(
    ("text", "c_type"),
    [
        ("Tensor a", "const opjit_tensor *a"),
        ("Tensor(z!) a", "opjit_tensor *a"),
        ("Tensor? a", "const opjit_tensor *a"),
        ("Tensor(z!)? a", "opjit_tensor *a"),
        ("Tensor[] a", "const opjit_tensors *a"),
        ("Tensor(z!)[] a", "const opjit_tensors *a"),
        ("Tensor[]? a", "const opjit_tensors *a"),
        ("Tensor[3] a", "const opjit_tensors *a"),
        ("int a", "int64_t a"),
        ("SymInt a", "int64_t a"),
        ("float a", "double a"),
        ("bool a", "bool a"),
        ("str a", "const char *a"),
        ("ScalarType a", "opjit_dtype a"),
        ("int? a", "const int64_t *a"),
        ("SymInt? a", "const int64_t *a"),
        ("float? a", "const double *a"),
        ("bool? a", "const bool *a"),
        ("str? a", "const char *a"),
        ("ScalarType? a", "const opjit_dtype *a"),
        ("int[] a", "const opjit_ints *a"),
        ("SymInt[] a", "const opjit_ints *a"),
        ("float[] a", "const opjit_floats *a"),
        ("bool[] a", "const opjit_bools *a"),
        ("int[2] a", "const opjit_ints *a"),
        ("SymInt[2] a", "const opjit_ints *a"),
        ("float[2] a", "const opjit_floats *a"),
        ("bool[2] a", "const opjit_bools *a"),
        ("int[]? a", "const opjit_ints *a"),
        ("float[]? a", "const opjit_floats *a"),
        ("bool[]? a", "const opjit_bools *a"),
        ("int[2]? a", "const opjit_ints *a"),
        ("*, int a=3", "int64_t a"),
        ("*, str a='x'", "const char *a"),
    ],
)
def test_every_type_of_the_table_has_its_c_type(text: str, c_type: str) -> None:
    parsed = parse(f"optest::f(Tensor x, {text}) -> ()")
    assert glue.parameters(parsed) == ["const opjit_tensor *x", c_type]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("returns", "c_types"),
    [
        ("()", []),
        ("Tensor", ["opjit_tensor *out"]),
        ("int", ["int64_t *out"]),
        ("SymInt", ["int64_t *out"]),
        ("float", ["double *out"]),
        ("bool", ["bool *out"]),
        ("(Tensor, Tensor)", ["opjit_tensor *out0", "opjit_tensor *out1"]),
        (
            "(Tensor sum, int n, float mean, bool any)",
            ["opjit_tensor *sum", "int64_t *n", "double *mean", "bool *any"],
        ),
        ("(float, Tensor, bool)", ["double *out0", "opjit_tensor *out1", "bool *out2"]),
        ("Tensor?", ["opjit_tensor *out"]),
        (
            "(Tensor[] parts, Tensor? rest, int n)",
            ["opjit_outputs *parts", "opjit_tensor *rest", "int64_t *n"],
        ),
    ],
)
def test_every_return_type_has_its_c_type(returns: str, c_types: list[str]) -> None:
    assert glue.parameters(parse(f"optest::f(Tensor x) -> {returns}"))[1:] == c_types


def test_a_schema_is_read_in_full() -> None:
    parsed = parse(
        "optest::f(Tensor x, Tensor(a!)? y, *, int[]? n=None) -> (Tensor first, Tensor second)"
    )
    assert (parsed.namespace, parsed.name, parsed.qualified) == ("optest", "f", "optest::f")
    assert parsed.arguments == (
        Argument("x", "Tensor"),
        Argument("y", "Tensor", optional=True, writes=True),
        Argument("n", "int", optional=True, list=True, keyword_only=True),
    )
    assert parsed.results == (Result("first", "Tensor"), Result("second", "Tensor"))
    assert parsed.mutates
    assert parse("f(Tensor x) -> Tensor").qualified == "opjit::f"
    assert parse(" f (Tensor x) -> Tensor").qualified == "opjit::f"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("f(Tensor x, Device d) -> Tensor", "use the device of a Tensor argument"),
        (
            "f(Tensor x, Scalar s) -> Tensor",
            "`s` is a Scalar, which has no form in C; use float or int",
        ),
        ("f(Tensor x, Scalar[]? s) -> Tensor", "use float or int"),
        ("f(Tensor x, Generator g) -> Tensor", "let it be None"),
        (
            "f(Tensor x, flaot a) -> Tensor",
            "argument `a` is a flaot, which has no form in C; did you mean float?",
        ),
        ("f(Tensor x, Stream s) -> Tensor", "the kernel receives torch's current stream anyway"),
        (
            "f(Tensor x, Dict(str, Tensor) d) -> Tensor",
            "use one list for the keys and one for the values",
        ),
        (
            "f(Tensor x, __torch__.torch.classes._nnapi.Compilation c) -> Tensor",
            "pass its parts as Tensors and numbers",
        ),
        ("f(Tensor x, complex c) -> Tensor", "use two floats"),
        ("f(Tensor?[] xs) -> Tensor", "leave the missing ones out: Tensor[]"),
        ("f(Tensor x, str[] s) -> Tensor", "lists are of Tensor, int, float, bool"),
        (
            "f(Tensor x, int[][] n) -> Tensor",
            "`n` is a int[][], which has no form in C; use one flat list",
        ),
        ("f(Tensor x, Layout y) -> Tensor", "`y` is a Layout, which has no form in C; use an int"),
        (
            "f(Tensor x, MemoryFormat y) -> Tensor",
            "`y` is a MemoryFormat, which has no form in C; use an int",
        ),
        (
            "f(Tensor x, SymBool y) -> Tensor",
            "`y` is a SymBool, which has no form in C; use a bool",
        ),
        (
            "f(Tensor x, (int, int) y) -> Tensor",
            "use Tensor, int, float, bool, str, ScalarType or a list of them",
        ),
        ("f(Tensor(a) x) -> Tensor(a)", "write Tensor, or Tensor(a!) if the kernel changes it"),
        (
            "f(Tensor x, Tensor(a!) y) -> Tensor(a!)",
            "return (), and let the caller keep using the argument",
        ),
        (
            "f(Tensor(a!) x) -> (Tensor(a!), Tensor)",
            "expected an aliased result in one of two forms",
        ),
        (
            "f(Tensor x, *, Tensor(a!) y, Tensor(b!) z) -> (Tensor(b!), Tensor(a!))",
            "which returns all arguments that it writes",
        ),
        (
            "f(Tensor(a!)? x, Tensor y) -> Tensor(a!)",
            "return (), and let the caller keep using the argument",
        ),
        (
            "f(Tensor(a!) x) -> int",
            "writes an argument and returns a plain int, which torch can neither compile nor export together; return "
            "it as a Tensor of one element",
        ),
        (
            "f(Tensor x, Tensor(a!)[]? ys) -> (Tensor, float)",
            "returns a plain float, which torch can neither compile nor export together",
        ),
        (
            "f(Tensor x, *, Tensor(a!) y) -> (bool, Tensor)",
            "returns a plain bool, which torch can neither compile nor export together",
        ),
        ("f(int n) -> Tensor", "has no Tensor argument"),
        ("f.out(Tensor x) -> Tensor", "C does not support overloads; call the op f_out instead"),
        (
            "f(Tensor x) -> Tensor[]?",
            "returns a Tensor[]?; an op returns Tensor, int, float, bool, Tensor?, Tensor[], or several of them",
        ),
        ("f(Tensor x) -> Tensor?[]", "returns a Tensor?[]; an op returns"),
        ("f(Tensor x) -> float?", "returns a float?; an op returns"),
        ("f(Tensor x) -> str", "returns a str; an op returns"),
        ("f(Tensor x, ...) -> Tensor", "any number of values"),
        ("f(Tensor x) -> ...", "any number of values"),
        ("f(Tensor x, Tensor x) -> Tensor", "two arguments named `x`"),
        ("__init__(Tensor x) -> Tensor", "torch.ops.optest.__init__ is an attribute"),
        ("name(Tensor x) -> Tensor", "torch.ops.optest.name is an attribute"),
    ],
)
def test_a_refusal_names_the_way_out(schema: str, says: str) -> None:
    with pytest.raises(SchemaError) as caught:
        parse(f"optest::{schema}")
    message = str(caught.value)
    assert says in message
    assert schema in message, "the message quotes the schema"
    assert "\n" not in message
    assert isinstance(caught.value, OpjitError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("f(Tensor x", "expected )"),
        ("f(Tensr x) -> Tensor", "unknown type specifier"),
        ("f(Tensor x) -> Tensr", "unknown type specifier"),
        ("f-g(Tensor x) -> Tensor", "expected eof but found '-'"),
        ("a::b::f(Tensor x) -> Tensor", "expected eof but found ':'"),
        ("f(Tensor x, __torch__.torch.classes.no.Such c) -> Tensor", "Unknown custom class type"),
        ("f(Tensor x, Optional[float] a) -> Tensor", "is a type of Python; write float?"),
        ("f(Tensor x, List[int] a) -> Tensor", "is a type of Python; write float[]"),
        ("f(Tensor x, list[int] a) -> Tensor", "is a type of Python; write float[]"),
        ("f(x: Tensor) -> Tensor", "the type comes before the name"),
        ("f(Tensor x)", "the result is missing; write -> Tensor"),
        (
            "f(Tensor x, float a=1.0, int b) -> Tensor",
            "an argument without a default follows one with a default; move it",
        ),
        ("größe(Tensor x) -> Tensor", "names hold ASCII letters, digits and _ only"),
        *(
            (
                f"f(Tensor x, {default}) -> Tensor",
                "a default is a number beyond the range of its type",
            )
            for default in ("float y=1e400", "int y=99999999999999999999", "float y=-1e999")
        ),
    ],
)
def test_unparsable_text_says_where(schema: str, says: str) -> None:
    with pytest.raises(SchemaError, match="torch cannot parse the schema") as caught:
        parse(schema)
    assert says in str(caught.value)
    assert repr(schema) in str(caught.value)
    assert re.search("HERE|eof|ASCII|range|write|move", str(caught.value)), "where it is"
    assert "INTERNAL ASSERT" not in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("written(Tensor(a!) x) -> ()", "writes an argument.*return a new tensor"),
        *(
            (f"kw(Tensor x, *, {more}) -> Tensor", "make it positional")
            for more in ("Tensor y", "Tensor? y=None", "Tensor[] y")
        ),
    ],
)
def test_a_backward_on_a_mutating_op_or_with_keyword_only_tensors_is_refused(
    make_op: Callable[..., Op], schema: str, says: str
) -> None:
    with pytest.raises(DeclarationError, match=says):
        make_op(schema).backward(lambda ctx, *grad: None)


# What C11, GNU C and C++ keep for themselves, the headers define, and the glue uses.
C_WORDS = [
    "alignas",
    "and",
    "asm",
    "auto",
    "bool",
    "char",
    "class",
    "compl",
    "const",
    "constexpr",
    "decltype",
    "default",
    "delete",
    "do",
    "double",
    "else",
    "enum",
    "explicit",
    "extern",
    "float",
    "for",
    "goto",
    "if",
    "inline",
    "int",
    "linux",
    "long",
    "mutable",
    "namespace",
    "new",
    "noexcept",
    "not",
    "nullptr",
    "operator",
    "or",
    "private",
    "register",
    "requires",
    "restrict",
    "return",
    "short",
    "signed",
    "sizeof",
    "static",
    "struct",
    "switch",
    "template",
    "this",
    "thread_local",
    "throw",
    "typedef",
    "typeid",
    "typename",
    "typeof",
    "union",
    "unix",
    "unsigned",
    "using",
    "virtual",
    "void",
    "volatile",
    "while",
    "xor",
    "NULL",
    "EOF",
]
GLUE_WORDS = [
    "out",
    "out0",
    "call",
    "stack",
    "boxed0",
    "arg0",
    "cell",
    "entry",
    "run",
    "target",
    "status",
    "stream",
    "num_args",
    "opjit_kernel",
    "i",
    "data",
    "printf",
    "errno",
    "assert",
]
HEADER_WORDS = [
    "opjit_tensor",
    "opjit_dtype",
    "opjit_ints",
    "OPJIT_OK",
    "OPJIT_TRY",
    "OPJIT_FLOAT32",
    "torch_ivalue",
    "aoti_torch_get_dim",
    "int64_t",
    "uint_fast16_t",
    "intptr_t",
    "size_t",
    "offsetof",
    "INT64_MAX",
    "SIZE_MAX",
    "INT_MAX",
    "CHAR_BIT",
    "INT64_C",
    "cudaStream_t",
]


def _legal(word: str) -> bool:
    try:
        parse(f"optest::f(Tensor x, int {word}) -> ()")
    except SchemaError:
        return False
    return True


def _names() -> list[list[str]]:
    words = [word for word in [*C_WORDS, *GLUE_WORDS, *HEADER_WORDS] if _legal(word)]
    assert {"default", "register", "double", "bool", "linux", "typeof"} <= {*words}
    return [words[:60], words[60:]]


@pytest.mark.parametrize(("kind", "value"), [("int", 3), ("Tensor", torch.ones(2)), ("str?", None)])
def test_arguments_may_have_any_name(make_op: Callable[..., Op], kind: str, value: object) -> None:
    for some in _names():
        op = make_op(
            f"names({', '.join(['Tensor x', *(f'{kind} {word}' for word in some)])}) -> (Tensor, Tensor)"
        )
        declared = glue.parameters(op.schema)
        names = c_names(op.schema)
        (op.folder / "names.c").write_text(
            f'#include "opjit.h"\nopjit_status names_cpu({", ".join(declared)})\n{{\n'
            + "".join(f"    (void){name};\n" for name in names)
            + f"    OPJIT_TRY(opjit_empty({names[-2]}, 0, NULL, OPJIT_INT64, x));\n    *(int64_t *){names[-2]}->data = 1;\n"
            + f"    return opjit_empty({names[-1]}, 0, NULL, OPJIT_INT64, x);\n}}\n"
        )
        assert op(torch.ones(1), *[value] * len(some))[0].item() == 1


@pytest.mark.nvcc
def test_arguments_may_have_any_name_in_cuda(make_op: Callable[..., Op]) -> None:
    for some in _names():
        op = make_op(
            f"names({', '.join(['Tensor x', *(f'int {word}' for word in some)])}) -> (Tensor, Tensor)"
        )
        (op.folder / "names.cu").write_text(
            f'#include "opjit_cuda.h"\nopjit_status names_cuda({", ".join(glue.parameters(op.schema))}, cudaStream_t stream)\n'
            + "{\n    return OPJIT_OK;\n}\n"
        )
        assert request.entry(
            op, targets.named("sm_90", backends.for_device("cuda"), "13.0")
        ).library.exists()


@pytest.mark.parametrize(
    "names", [("a", "a"), ("out1", ""), ("x", ""), ("stream", "stream_"), ("", "out0")]
)
def test_results_have_names_of_their_own(names: tuple[str, str]) -> None:
    op_schema = f"optest::f(Tensor x, Tensor out0, int out_, int default, int default_) -> (Tensor {names[0]}, Tensor {names[1]})"
    declared = [name.rpartition(" ")[2].lstrip("*") for name in glue.parameters(parse(op_schema))]
    assert len(set(declared)) == len(declared), declared
    assert "stream" not in declared


@pytest.mark.parametrize(
    "name", ["_Bool", "_Complex", "__LINE__", "_Generic", "linux", "unix", "errno", "__has_include"]
)
def test_a_name_that_c_keeps_for_itself_is_passed_under_another(name: str) -> None:
    assert c_names(parse(f"a::b(Tensor {name}) -> Tensor")) == [f"{name}_", "out"]
