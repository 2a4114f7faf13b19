"""Split a .cu file like nvcc: the host's part for g++, and the device's part for NVRTC, which does
not accept host code.

    part            kernel's body   other device functions   host functions   kernel<<<grid, block>>>(x)
    host            launches it     declarations             as they are      configure(grid, block), then kernel(x)
    device          as it is        as they are              removed          removed with its function

Variables of the host go with its functions. Both parts keep every line of the file at its number, so that messages point into it. Files
that the split does not understand raise `NvccOnly`, and nvcc compiles them."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from opjit.builder.compile_step import NvccOnly
from opjit.builder.layouts import Layout
from opjit.builder.signatures import (
    Parameter,
    after_template,
    callee_start,
    name_before,
    parameters_of,
    template_arguments,
)
from opjit.builder.tokens import (
    CLOSING,
    Malformed,
    Token,
    launch_end,
    match_brackets,
    outer_indices,
    split_at_commas,
    tokenize,
)

_DEVICE_HEADER = r"#[ \t]*include[ \t]*[<\"](?:cooperative_groups|cub/|cuda/|mma\.h|cuda_pipeline|cuda_awbarrier)"
# Names before parentheses that do not contain parameters.
_ATTRIBUTES_NAMES = """
    __launch_bounds__ __attribute__ alignas __align__ __cluster_dims__ __maxnreg__
    __block_size__ decltype noexcept __declspec asm __asm__ requires explicit
"""
_ATTRIBUTES = frozenset(_ATTRIBUTES_NAMES.split())
_REFUSED = {"__managed__", "__nv_pure__", "__nv_register_params__", "nvstd"}
_TYPES_NAMES = """
    using typedef struct class union enum namespace static_assert friend
"""
_TYPES = frozenset(_TYPES_NAMES.split())
_SPACES = {"__global__", "__device__", "__host__", "__constant__", "constexpr", "consteval"}
_LINE = re.compile(r"^#line (\d+) (.*)\n", re.MULTILINE)
# Names in the types of parameters that are no classes.
_SCALAR_NAMES = """
    const volatile __restrict__ restrict unsigned signed bool char short int long float double size_t ptrdiff_t std
    int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t intptr_t uintptr_t
"""
_SCALARS = frozenset(_SCALAR_NAMES.split())
_MAX_MEMBERS = 24  # an assembler statement accepts 30 operands
_NO_MEMBERS = _TYPES | {"static", "template", "public", "private", "protected"}
_Edit = tuple[int, int, str]  # the text between two places


class Variable(NamedTuple):
    """A variable in device memory: its name with namespaces, and whether it is ``__constant__``."""

    name: str
    constant: bool


class Halves(NamedTuple):
    """A split file."""

    host: str
    device: str
    kernels: frozenset[str]  # names with namespaces
    internal: frozenset[str]  # of kernels, no templates, that the author declared static or inline
    templates: bool  # whether a kernel is one
    variables: tuple[Variable, ...]
    layouts: tuple[Layout, ...] = ()  # OPJIT_LAYOUT_<index> in the device's part marks a check


def _spaces_of_macros(text: str) -> dict[str, set[str]]:
    """Return the execution spaces that each macro of a file expands to, such as ``{"HD": {"__host__", "__device__"}}``."""
    bodies = dict[str, set[str]]()
    for match in re.finditer(
        r"^[ \t]*#[ \t]*define[ \t]+(\w+)((?:\\\n|[^\n])*)", text, re.MULTILINE
    ):
        bodies.setdefault(match[1], set()).update(re.findall(r"[A-Za-z_]\w*", match[2]))
    spaces = {name: words & _SPACES for name, words in bodies.items()}
    for _ in range(8):  # a macro may use another
        for name, words in bodies.items():
            for other in words & spaces.keys():
                spaces[name] = spaces[name] | spaces[other]
    return {name: found for name, found in spaces.items() if found}


def split(text: str, unnamed: str = "opjit_unnamed") -> Halves:
    """Split a file, given a name for its unnamed namespaces, the same in its headers and no other file's. Raises NvccOnly if only nvcc
    compiles it."""
    try:
        splitter = _Splitter(text, unnamed)
        splitter.scope(0, len(splitter.tokens), ())
    except Malformed as malformed:
        raise NvccOnly(str(malformed)) from None
    return Halves(
        _edited(text, splitter.host),
        _edited(text, splitter.device),
        frozenset(splitter.kernels),
        frozenset(splitter.internal),
        splitter.templates,
        tuple(splitter.variables),
        tuple(splitter.layouts),
    )


def _edited(text: str, edits: list[_Edit]) -> str:
    pieces = []
    at = 0
    for start, end, new in sorted(edits):
        if start >= at:  # else inside a part that is removed
            pieces += [text[at:start], new]
            at = end
    return "".join([*pieces, text[at:]])


class _Splitter:
    """One file, on its way to two parts."""

    def __init__(self, text: str, unnamed: str) -> None:
        every = tokenize(text)
        self.text = text
        self.macros = _spaces_of_macros(text)
        self.unnamed = unnamed
        self.tokens = [token for token in every if token.kind != "directive"]
        self.host = list[_Edit]()
        self.device = list[_Edit]()
        self.kernels = set[str]()
        self.internal = set[str]()
        self.templates = False
        self.variables = list[Variable]()
        self.layouts = list[Layout]()
        self.members: dict[str, tuple[str, ...]] = {}  # of structs, by their names
        refused = _REFUSED & {token.text for token in self.tokens}
        if refused:
            raise NvccOnly(f"it uses {min(refused)}")
        self.closing = match_brackets(self.tokens)
        self._launches(self.tokens, self.closing)
        before = "("
        for token in every:
            # The host's part needs no headers for the device alone.
            is_unused = token.kind == "directive" and re.match(_DEVICE_HEADER, token.text)
            is_alone = (
                token.text == "__noinline__" and before != "("
            )  # for g++, an attribute's name
            if is_unused or is_alone:
                self._replace(self.host, token.start, token.end)
            if token.kind == "directive" and "<<<" in token.text:
                at = token.start + token.text.index("#") + 1
                inner = [
                    each._replace(start=each.start + at, end=each.end + at)
                    for each in tokenize(self.text[at : token.end])
                ]
                self._launches(inner, match_brackets(inner))
            before = token.text

    def _replace(self, part: list[_Edit], start: int, end: int, text: str = "") -> None:
        """Replace a text in a part, and keep the number of its lines."""
        removed = self.text[start:end]
        directives = list(_LINE.finditer(removed))
        if not directives:
            part.append((start, end, text + "\n" * removed.count("\n")))
            return
        last = directives[-1]
        number = int(last[1]) + removed.count("\n", last.end())
        part.append((start, end, f"{text}\n#line {number} {last[2]}\n"))

    def _source(self, start: int, end: int) -> str:
        """Return a part of the text in one line."""
        return " ".join(_LINE.sub("", self.text[start:end]).split())

    def _drop(self, tokens: Iterable[Token], words: Collection[str]) -> bool:
        """Leave words out of both parts. Returns whether there are any."""
        found = [(token.start, token.end, "") for token in tokens if token.text in words]
        self.host += found
        self.device += found
        return bool(found)

    def _launches(self, tokens: list[Token], closing: Mapping[int, int]) -> None:
        """Replace ``kernel<<<grid, block>>>(x)`` by ``(configure(grid, block) ? (void)0 : kernel(x))``, as nvcc does."""
        for index, token in enumerate(tokens):
            if token.text != "<<<":
                continue
            end = launch_end(tokens, closing, index)
            if end + 3 >= len(tokens) or tokens[end + 3].text != "(":
                raise NvccOnly("it has a launch without arguments in parentheses")
            first = tokens[callee_start(tokens, index, closing)]
            last = tokens[closing[end + 3]]
            configuration = self.text[token.end : tokens[end].start]
            self.host += [
                (
                    first.start,
                    first.start,
                    f"(__cudaPushCallConfiguration({configuration}) ? (void)0 : ",
                ),
                (token.start, tokens[end + 2].end, ""),
                (last.end, last.end, ")"),
            ]

    def scope(self, at: int, end: int, names: tuple[str, ...], in_class: bool = False) -> None:
        """Walk the declarations of a namespace or class."""
        begin = at
        while at < end:
            token = self.tokens[at]
            if token.text == ";" or (in_class and token.text == ":" and at == begin + 1):
                if token.text == ";" and not in_class:
                    self._declaration(begin, at, names)
                begin = at + 1
            elif token.text == "{":
                at, begin = self._block(begin, at, names, in_class)
                continue
            elif token.text in CLOSING:
                at = self.closing[at]
            at += 1

    def _block(
        self, begin: int, at: int, names: tuple[str, ...], in_class: bool
    ) -> tuple[int, int]:
        """Handle a brace and the declaration before it.

        Returns the index to continue at, and the start of the declaration in progress.
        """
        begin = self._after_macros(begin, at)
        head = self.tokens[begin:at]
        close = self.closing[at]
        words = [token.text for token in head]
        if "namespace" in words and "(" not in words:
            if words[-1] == "namespace":  # nvcc's and NVRTC's names of an unnamed namespace differ
                for part in (self.host, self.device):
                    part += [
                        (head[0].start, head[0].start, "inline "),
                        (head[-1].end, head[-1].end, f" {self.unnamed}"),
                    ]
                inner = (*names, self.unnamed)
            else:
                inner = (
                    *names,
                    *(
                        word
                        for word in words[words.index("namespace") + 1 :]
                        if word not in ("::", "inline")
                    ),
                )
            self.scope(at + 1, close, inner)
            return close + 1, close + 1
        if words[:1] == ["extern"] and len(head) == 2 and head[1].kind == "string":
            self.scope(at + 1, close, names)
            return close + 1, close + 1
        declared = after_template(head)
        if "enum" in words[declared : declared + 1]:
            return close + 1, begin
        parameters = self._parameters(begin + declared, at)
        if parameters is not None and "=" not in (
            token.text for token in self._outer(begin + declared, parameters)
        ):
            self._function(begin, declared, parameters, at, names, in_class)
            return close + 1, close + 1
        if {"struct", "class", "union"} & set(words[declared:]):
            if any(token.text == "<<<" for token in self.tokens[at:close]):
                raise NvccOnly("it launches a kernel from a method")
            self._note_members(head[declared:], at, close, declared > 0)
            self.scope(at + 1, close, (*names, "*"), in_class=True)
        return close + 1, begin

    def _after_macros(self, begin: int, end: int) -> int:
        """Return the index after calls of macros, which need no semicolon, at the start of a declaration."""
        at = begin
        while at + 1 < end and self.tokens[at].text.isupper() and self.tokens[at + 1].text == "(":
            begin = at
            at = self.closing[at + 1] + 1
        return at if at < end else begin

    def _outer(self, begin: int, end: int) -> Iterator[Token]:
        """Yield the tokens outside of parentheses, brackets and braces."""
        for index in outer_indices(self.closing, begin, end):
            yield self.tokens[index]

    def _parameters(self, begin: int, end: int) -> int | None:
        """Return the index of the parenthesis that opens a function's parameters, or None."""
        at = begin
        found = None
        while at < end and self.tokens[at].text != ":":
            before = self.tokens[at - 1]
            if (
                self.tokens[at].text == "("
                and at > begin
                and before.text not in _ATTRIBUTES
                and (
                    before.kind == "name"
                    or before.text == ">"
                    or (before.text == ")" and self.tokens[at - 3].text == "operator")
                )
            ):
                found = at
            at = self.closing.get(at, at) + 1
        return found

    def _spaces(self, begin: int, end: int) -> set[str]:
        words = [token.text for token in self._outer(begin, end)]
        return (_SPACES & {*words}).union(*(self.macros.get(word, ()) for word in words))

    def _function(
        self,
        begin: int,
        declared: int,
        parameters: int,
        body: int,
        names: tuple[str, ...],
        in_class: bool,
    ) -> None:
        spaces = self._spaces(begin + declared, parameters)
        after = self.closing[body]
        launches = any(token.text == "<<<" for token in self.tokens[body:after])
        if "__global__" in spaces:
            self._kernel(begin, declared, parameters, body, names)
        elif "__device__" in spaces:
            if launches:
                raise NvccOnly("it launches a kernel from a kernel")
            if "__host__" not in spaces and not spaces & {"constexpr", "consteval"}:
                start = next(
                    (
                        token
                        for token in self._outer(self.closing[parameters] + 1, body)
                        if token.text == ":"
                    ),
                    self.tokens[body],
                )
                self._replace(self.host, start.start, self.tokens[after].end, ";")
        elif not in_class and not spaces & {"constexpr", "consteval"}:
            self._replace(self.device, self.tokens[begin].start, self.tokens[after].end)

    def _kernel(
        self, begin: int, declared: int, parameters: int, body: int, names: tuple[str, ...]
    ) -> None:
        """Give a kernel external linkage in both parts, and in the host's a body that launches it."""
        if "*" in names:
            raise NvccOnly("a kernel is a member of a class")
        internal = self._external(begin + declared, parameters)
        at = name_before(self.tokens, parameters)
        name = self.tokens[at].text
        callee = self._source(self.tokens[at].start, self.tokens[parameters].start)
        if declared and at == parameters - 1:
            callee += template_arguments(self.tokens[begin : begin + declared])
        given = parameters_of(self.tokens, self.closing, parameters)
        types = ", ".join(self._source(each.tokens[0].start, each.end) for each in given)
        addresses = "".join(each.address for each in given)
        notes = self._layouts_of(given, self.tokens[body].end)
        start = self.tokens[body].start
        end = self.tokens[self.closing[body]].end
        stub = (
            f"{{ {notes}void *opjit_arguments[] = {{{addresses}nullptr}}; "
            f"opjit_launch((const void *)static_cast<void (*)({types})>(&{callee}), opjit_arguments); }}"
        )
        self._replace(self.host, start, end, stub)
        self.kernels.add("::".join((*names, name)))
        self.internal |= {"::".join((*names, name))} if internal and not declared else set()
        self.templates |= declared > 0

    def _layouts_of(self, parameters: Iterable[Parameter], body: int) -> str:
        """Enter the parameters of a kernel that may be classes. Returns the code that notes their layouts on the host."""
        notes = ""
        checks = ""
        for group, name, _ in parameters:
            words = [token.text for token in group if token.kind == "name"]
            is_scalar = _SCALARS.issuperset(word for word in words if word != name)
            if is_scalar or name.endswith("...") or {"*", "&"} & {token.text for token in group}:
                continue
            named = next(token for token in group if token.text == name)
            typed = self._source(group[0].start, named.start).replace("const ", "")
            layout = Layout(typed, name, self.members.get(typed, ()))
            number = len(self.layouts)
            self.layouts.append(layout)
            notes += layout.note(number)
            checks += f" OPJIT_LAYOUT_{number}"
        if checks:
            self.device.append((body, body, checks + " "))
        return notes

    def _note_members(self, head: list[Token], opened: int, close: int, template: bool) -> None:
        """Note the members of a struct with offsets that a program may query."""
        words = [token.text for token in head]
        if template or words[0] not in ("struct", "union"):
            return
        ends = words.index(":") if ":" in words else len(words)
        members = list[str]()
        begin = opened + 1
        for at in outer_indices(self.closing, opened + 1, close):
            if self.tokens[at].text in ("private", "protected"):
                break
            if self.tokens[at].text == ";":
                members += self._declared_members(begin, at)
                begin = at + 1
        self.members[words[ends - 1]] = tuple(members[:_MAX_MEMBERS])

    def _declared_members(self, begin: int, end: int) -> Iterator[str]:
        """Yield the names that a declaration in a struct declares, but for functions and bit fields."""
        outer = [self.tokens[at] for at in outer_indices(self.closing, begin, end)]
        words = {token.text for token in outer}
        if words & _NO_MEMBERS or words & {"(", "{", "&", ":"} or len(outer) < 2:
            return
        for start, stop in split_at_commas(self.tokens, self.closing, begin, end):
            texts = [self.tokens[at].text for at in outer_indices(self.closing, start, stop)]
            for mark in ("=", "["):
                if mark in texts:
                    texts = texts[: texts.index(mark)]
            if texts and re.fullmatch(r"[A-Za-z_]\w*", texts[-1]):
                yield texts[-1]

    def _external(self, begin: int, end: int) -> bool:
        """Leave out of a kernel's declaration what would keep its name in this file. Returns whether there was something."""
        return self._drop(
            self._outer(begin, end), ("static", "inline", "__inline__", "__forceinline__")
        )

    def _declaration(self, begin: int, end: int, names: tuple[str, ...]) -> None:
        """Handle a declaration of variables or of a function that is defined elsewhere."""
        begin = self._after_macros(begin, end)
        declaration = self.tokens[begin:end]
        if not declaration or declaration[0].text in _TYPES:
            return
        declared = after_template(declaration)
        spaces = self._spaces(begin + declared, end)
        parameters = self._parameters(begin + declared, end)
        words = [token.text for token in declaration]
        is_function = parameters is not None and parameters - begin - declared > 1
        if (
            spaces & {"__device__", "__constant__"}
            and not is_function
            and "__global__" not in spaces
            and words[0] != "template"
        ):
            self._variable(declaration, begin, "__constant__" in spaces, names)
        elif "__global__" in spaces and is_function and parameters is not None:
            if self._external(begin + declared, parameters) and not declared:
                self.internal.add("::".join((*names, self.tokens[parameters - 1].text)))
        elif spaces or "__shared__" in words:
            return
        elif is_function or (
            parameters is None and len(words) > 1 and "const" not in words and not declared
        ):
            self._replace(self.device, declaration[0].start, declaration[-1].end)

    def _variable(
        self, declaration: list[Token], begin: int, constant: bool, names: tuple[str, ...]
    ) -> None:
        """Note a variable in device memory, and give it external linkage."""
        words = [token.text for token in declaration]
        if "extern" in words or "constexpr" in words:
            raise NvccOnly("a device variable is extern or constexpr")
        end = next(
            (index for index, token in enumerate(declaration) if token.text in ("=", "[", "{")),
            len(declaration),
        )
        if "," in (token.text for token in self._outer(begin, begin + end)):
            raise NvccOnly("one declaration has several device variables")
        self._drop(declaration[:end], ("static",))
        if "const" in words:
            self.host.append((declaration[0].start, declaration[0].start, "extern "))
        self.variables.append(Variable("::".join((*names, words[end - 1])), constant))
