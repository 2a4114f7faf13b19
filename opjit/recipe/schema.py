"""An op's schema. torch parses the text.

This module keeps the parts that the glue needs, and rejects types that C does not support.
"""

import difflib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from opjit.errors import SchemaError

# Reserved words of C11, GNU C, C++17 and system headers, and the name of a CUDA kernel's last parameter.
_RESERVED_NAMES = """
    NULL EOF alignas alignof and and_eq asm auto bitand bitor bool break case catch char
    char16_t char32_t class compl const const_cast constexpr continue decltype default
    delete do double dynamic_cast else enum explicit export extern false float for friend
    goto if inline int linux long mutable namespace new noexcept not not_eq nullptr
    operator or or_eq private protected public register reinterpret_cast restrict return
    short signed sizeof static static_assert static_cast stream struct switch template
    this thread_local throw true try typedef typeid typename typeof union unix unsigned
    using virtual void volatile wchar_t while xor xor_eq
"""
_RESERVED = frozenset(_RESERVED_NAMES.split())
# Types and macros of opjit's headers, <stdint.h>, <stddef.h>, <limits.h> and <cuda_runtime.h>; and what C keeps for itself and compilers.
_OF_HEADERS = (
    r"_[A-Z_].*|linux|unix|errno|"
    r"(opjit|OPJIT|torch|aoti)_.*|u?int(_fast|_least)?\d+_t|u?int(max|ptr)_t|(size|ptrdiff|max_align|cudaStream)_t|"
    r"offsetof|[A-Z][A-Z0-9_]*_(MAX|MIN|BIT|WIDTH)|U?INT(MAX|\d+)_C"
)


class ValueType(NamedTuple):
    """A type of arguments that has a form in C. A new one needs a line in `TYPES` and, if it is not a plain value, how `builder.glue`
    reads it.

    Attributes:
        torch_kinds: torch's names of the kind of type.
        c_type: the type of the kernel's parameter, or the type that the parameter points to.
        unbox: the expression that reads a plain value from a boxed one.
        box: the expression that boxes a result; empty if an op cannot return the type.
        shim: the type in a C shim of torch's AOTInductor; empty if shims do not have it.
        can_be_listed: whether an op accepts a list of these values.
    """

    torch_kinds: tuple[str, ...]
    c_type: str
    unbox: str = ""
    box: str = ""
    shim: str = ""
    can_be_listed: bool = False


TYPES = {
    "Tensor": ValueType(
        ("TensorType",),
        "opjit_tensor",
        box="opjit_handle_value({}.handle)",
        shim="AtenTensorHandle",
        can_be_listed=True,
    ),
    "int": ValueType(
        ("IntType", "SymIntType"), "int64_t", "(int64_t){}", "(torch_ivalue){}", "int64_t", True
    ),
    "float": ValueType(
        ("FloatType",), "double", "opjit_double({})", "opjit_double_value({})", "double", True
    ),
    "bool": ValueType(("BoolType",), "bool", "opjit_bool({})", "(torch_ivalue){}", "int32_t", True),
    "str": ValueType(("StringType",), "const char *"),
    "ScalarType": ValueType(
        ("ScalarTypeType",), "opjit_dtype", "opjit_dtype_of({})", shim="int32_t"
    ),
    "Generator": ValueType(("GeneratorType",), "uint64_t"),
}
SCALARS = tuple(kind for kind in TYPES if kind not in ("Tensor", "Generator"))
LISTED = tuple(kind for kind, each in TYPES.items() if each.can_be_listed)
RETURNED = tuple(kind for kind, each in TYPES.items() if each.box)
_KINDS = {name: kind for kind, each in TYPES.items() for name in each.torch_kinds}

# Alternatives to types that C does not support.
_ALTERNATIVES = {
    "DeviceObjType": "use the device of a Tensor argument",
    "NumberType": "use float or int, because torch's stable C interface cannot pass a Scalar. A float also accepts ints",
    "ComplexType": "use two floats",
    "StreamObjType": "the kernel receives torch's current stream anyway",
    "DictType": "use one list for the keys and one for the values",
    "ClassType": "pass its parts as Tensors and numbers",
    "LayoutType": "use an int",
    "MemoryFormatType": "use an int",
    "SymBoolType": "use a bool",
    "ListType": "use one flat list, and its lengths as another",
}

# Answers to a schema that torch cannot parse, by a part of the schema or of torch's message.
_ANSWERS = {
    "Optional[": "Optional[float] is a type of Python; write float?",
    "List[": "List[float] is a type of Python; write float[]",
    "list[": "list[float] is a type of Python; write float[]",
    "expected ident but found ':'": "the type comes before the name; write Tensor x for x: Tensor",
    "expected arrow": "the result is missing; write -> Tensor behind the arguments, or -> ()",
    "seen_default_arg": "an argument without a default follows one with a default; move it to the front, or give it a default",
}

# Types that torch prints by another name than a schema uses.
_SPELLED = {"NumberType": "Scalar", "SymBoolType": "SymBool", "SymIntType": "SymInt"}


class Argument(NamedTuple):
    """One argument: ``kind`` is one of SCALARS or "Tensor", alone, optional, or as a list; or an optional "Generator"."""

    name: str
    kind: str
    optional: bool = False
    list: bool = False
    writes: bool = False
    keyword_only: bool = False

    @property
    def plain(self) -> bool:
        return self.kind == "Tensor" and not (self.list or self.optional)


class Result(NamedTuple):
    """One result: ``kind`` is one of RETURNED; a Tensor may be optional, or a list."""

    name: str
    kind: str
    optional: bool = False
    list: bool = False


def spelled(value: Argument | Result) -> str:
    """Return an argument or a result as a schema writes it, without what it writes: ``Tensor? x``."""
    return f"{value.kind}{'[]' * value.list}{'?' * value.optional} {value.name}".rstrip()


class Schema(NamedTuple):
    """A parsed schema; `text` is the canonical form that torch prints.

    `results` are the results that the kernel makes. If an op returns the arguments that it writes, `results` is empty, and `returned` has
    their places. `tags` are the names of the author's tags, sorted.
    """

    text: str
    namespace: str
    name: str
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    returned: tuple[int, ...] = ()
    tags: tuple[str, ...] = ()

    @property
    def draws(self) -> bool:
        """Whether the kernel gets a seed from a generator."""
        return any(argument.kind == "Generator" for argument in self.arguments)

    @property
    def has_tensor_list(self) -> bool:
        """Whether the op accepts or returns a list of tensors, which torch.func cannot transform."""
        tensors = [argument for argument in self.arguments if argument.kind == "Tensor"]
        return any(each.list for each in tensors) or any(each.list for each in self.results)

    @property
    def all_tags(self) -> list[str]:
        return sorted(
            {*self.tags, "pt2_compliant_tag", *(["nondeterministic_seeded"] if self.draws else [])}
        )

    @property
    def qualified(self) -> str:
        return f"{self.namespace}::{self.name}"

    @property
    def mutates(self) -> bool:
        return any(argument.writes for argument in self.arguments)


def c_names(schema: Schema) -> list[str]:
    """Return the C names of the arguments, then of the results (default: ``out``). A taken name gets a ``_`` appended."""
    results = schema.results
    names = []
    for name in [
        *(argument.name for argument in schema.arguments),
        *(
            result.name or ("out" if len(results) == 1 else f"out{index}")
            for index, result in enumerate(results)
        ),
    ]:
        name += "_" if re.fullmatch(_OF_HEADERS, name) else ""
        while name in _RESERVED or name in names:
            name += "_"
        names.append(name)
    return names


def parse(text: str, tags: Sequence[str] = ()) -> Schema:
    """Parse ``"ns::name(Tensor x, float a) -> Tensor"``.

    The default namespace is ``opjit``. Raises SchemaError if torch cannot parse it, or if C does
    not support a type. The message contains an alternative.
    """
    import torch  # late: the command's help and versions do without

    qualified = text if "::" in text.partition("(")[0] else f"opjit::{text.strip()}"
    try:
        parsed = torch._C.parse_schema(qualified)
    except (RuntimeError, UnicodeDecodeError, IndexError) as error:
        # torch's message about a non-ASCII letter quotes only a part of it, or is empty; that about a number is "stod".
        reason = (
            str(error).strip() if text.isascii() else "names hold ASCII letters, digits and _ only"
        )
        if isinstance(error, IndexError):
            reason = "a default is a number beyond the range of its type"
        for part, answer in _ANSWERS.items():
            if part in f"{text} {reason}":
                reason = answer
        raise SchemaError(f"torch cannot parse the schema {text!r}: {reason}") from None
    namespace, _, name = parsed.name.partition("::")
    if parsed.overload_name:
        raise SchemaError(
            f"schema {text!r}: C does not support overloads; call the op "
            f"{name}_{parsed.overload_name} instead"
        )
    if hasattr(torch._ops._OpNamespace, name) or name in vars(torch._ops._OpNamespace(namespace)):
        raise SchemaError(
            f"schema {text!r}: torch.ops.{namespace}.{name} is an attribute of every torch namespace; "
            "choose another name"
        )
    arguments = tuple(_argument(text, argument) for argument in parsed.arguments)
    returned = _returned(text, parsed, arguments)
    results = () if returned else tuple(_result(text, result) for result in parsed.returns)
    if "..." in text and "..." in re.sub(r"""(["']).*?\1""", "", text):
        raise SchemaError(
            f"schema {text!r} accepts or returns any number of values; declare each value, or use "
            "a list"
        )
    names = [argument.name for argument in arguments]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise SchemaError(f"schema {text!r} has two arguments named `{repeated}`; rename one")
    if not any(argument.kind == "Tensor" for argument in arguments):
        raise SchemaError(
            f"schema {text!r} has no Tensor argument, so torch cannot choose a device's kernel; "
            "add one, such as a tensor on the result's device"
        )
    number = next((result.kind for result in results if result.kind != "Tensor"), None)
    if number is not None and any(argument.writes for argument in arguments):
        raise SchemaError(
            f"schema {text!r} writes an argument and returns a plain {number}, which torch can neither compile nor export "
            "together; return it as a Tensor of one element"
        )
    return Schema(
        str(parsed), namespace, name, arguments, results, returned, tuple(sorted({*tags}))
    )


def _argument(text: str, argument: Any) -> Argument:
    torch_type = argument.real_type
    optional = torch_type.kind() == "OptionalType"
    if optional:
        torch_type = torch_type.getElementType()
    listed = torch_type.kind() == "ListType"
    if listed:
        torch_type = torch_type.getElementType()
    kind = _KINDS.get(torch_type.kind())
    alias = argument.alias_info
    problem = None
    if kind is None:
        close = difflib.get_close_matches(str(torch_type), ("Tensor", "SymInt", *SCALARS), n=1)
        hint = (
            f"did you mean {close[0]}?"
            if close
            else f"use Tensor, {', '.join(SCALARS)} or a list of them"
        )
        hint = _ALTERNATIVES.get(torch_type.kind(), hint)
        if torch_type.kind() == "OptionalType":
            hint = f"leave the missing ones out: {_spelled_type(torch_type.getElementType())}[]"
        problem = f", which has no form in C; {hint}"
    elif listed and kind not in LISTED:
        problem = f", which has no form in C; lists are of {', '.join(LISTED)}"
    elif kind == "Generator" and not optional:
        problem = (
            "; let it be None for the device's default generator, like in ops of torch: "
            "`Generator? generator=None`"
        )
    elif alias is not None and not alias.is_write:
        problem = " with an alias that is not written; write Tensor, or Tensor(a!) if the kernel changes it"
    if kind is None or problem is not None:
        raise SchemaError(
            f"schema {text!r}: argument `{argument.name}` is a {_spelled_type(argument.real_type)}{problem}"
        )
    return Argument(argument.name, kind, optional, listed, alias is not None, argument.kwarg_only)


def _returned(text: str, parsed: Any, arguments: tuple[Argument, ...]) -> tuple[int, ...]:
    """Return the positions of the arguments that an op returns, like ops of torch: the first
    argument of ``add_``, or all keyword-only ones.
    """
    sets = [
        result.alias_info.after_set if result.alias_info else set() for result in parsed.returns
    ]
    if not any(sets):
        return ()
    written = tuple(place for place, argument in enumerate(arguments) if argument.writes)
    same = sets == [parsed.arguments[place].alias_info.after_set for place in written]
    plain = all(arguments[place].plain for place in written)
    keyword_only = [arguments[place].keyword_only for place in written]
    if not (same and plain and (all(keyword_only) or (written == (0,) and not any(keyword_only)))):
        raise SchemaError(
            f"schema {text!r}: expected an aliased result in one of two forms: in place, add_(Tensor(a!) x) -> Tensor(a!), "
            "or out=, add(Tensor x, *, Tensor(a!) out) -> Tensor(a!), which returns all arguments that it writes. Otherwise "
            "return (), and let the caller keep using the argument"
        )
    return written


def _result(text: str, result: Any) -> Result:
    torch_type = result.real_type
    form = torch_type.kind() if torch_type.kind() in ("OptionalType", "ListType") else ""
    kind = _KINDS.get((torch_type.getElementType() if form else torch_type).kind())
    if kind not in RETURNED or (form and kind != "Tensor"):
        raise SchemaError(
            f"schema {text!r} returns a {_spelled_type(torch_type)}; an op returns {', '.join(RETURNED)}, Tensor?, Tensor[], "
            "or several of them"
        )
    return Result(result.name, kind, form == "OptionalType", form == "ListType")


def _spelled_type(torch_type: Any) -> str:
    """Return a type as a schema writes it: ``Scalar[]?``."""
    kind: str = torch_type.kind()
    if kind in ("OptionalType", "ListType"):
        return _spelled_type(torch_type.getElementType()) + (
            "?" if kind == "OptionalType" else "[]"
        )
    return _SPELLED.get(kind) or str(torch_type)
