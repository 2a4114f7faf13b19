"""Split a .cu file like nvcc: the host's part for g++, and the device's part for NVRTC, which does
not accept host code.

    part            kernel's body   other device functions   host functions   kernel<<<grid, block>>>(x)
    host            launches it     declarations             as they are      configure(grid, block), then kernel(x)
    device          as it is        as they are              removed          removed with its function

Variables of the host go with its functions. Both parts keep every line of the file at its number, so that messages point into it. Files
that the split does not understand raise `NvccOnly`, and nvcc compiles them."""

import re
from collections.abc import Iterable, Iterator

from opjit.builder.cuda_reader import CudaReader, Edit, KernelDefinition, edited
from opjit.builder.layouts import Layout
from opjit.builder.tokens import CLOSING
from opjit.recipe.nvcc_flags import NvccOnly

_DEVICE_HEADER = r"#[ \t]*include[ \t]*[<\"](?:cooperative_groups|cub/|cuda/|mma\.h|cuda_pipeline|cuda_awbarrier)"
_REFUSED = {"__managed__", "__nv_pure__", "__nv_register_params__", "nvstd"}
_TYPES_NAMES = """
    using typedef struct class union enum namespace static_assert friend
"""
_TYPES = frozenset(_TYPES_NAMES.split())
_SPACES = {"__global__", "__device__", "__host__", "__constant__", "constexpr", "consteval"}
# Names in the types of parameters that are no classes.
_SCALAR_NAMES = """
    const volatile __restrict__ restrict unsigned signed bool char short int long float double size_t ptrdiff_t std
    int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t intptr_t uintptr_t
"""
_SCALARS = frozenset(_SCALAR_NAMES.split())
# kernel<<<grid, block>>>(x) becomes what nvcc makes of it.
_CONFIGURED = ("(__cudaPushCallConfiguration({}) ? (void)0 : ", ")")
_MAX_MEMBERS = 24  # an assembler statement accepts 30 operands
_NO_MEMBERS = _TYPES | {"static", "template", "public", "private", "protected", *"({&:"}


class Halves(CudaReader):
    """A file that is split into the texts `host` and `device`.

    Attributes:
        kernel_names: names of kernels, with namespaces.
        internal: the names of kernels, no templates, that the author declared static or inline.
        templates: whether a kernel is one.
        variables: variables in device memory by their names with namespaces, and whether they are ``__constant__``.
        layouts: the types of the parameters of kernels. OPJIT_LAYOUT_<index> in the device's part marks a check.
    """

    def __init__(self, text: str, unnamed: str = "opjit_unnamed") -> None:
        """Split a file, given a name for its unnamed namespaces, the same in its headers and no other file's. Raises NvccOnly if only nvcc
        compiles it."""
        super().__init__(text)
        self.unnamed = unnamed
        self.kernel_names = set[str]()
        self.internal = set[str]()
        self.templates = False
        self.variables = dict[str, bool]()
        self.layouts = list[Layout]()
        self._of_host = list[Edit]()
        self._of_device = list[Edit]()
        self._members: dict[str, tuple[str, ...]] = {}  # of structs, by their names
        self._macros: dict[str, set[str]] = {}  # the execution spaces that each expands to
        refused = _REFUSED & {*self.words}
        if refused:
            raise NvccOnly(f"it uses {min(refused)}")
        self._kernels = {kernel.body: kernel for kernel in self.kernels()}
        self._note_macros()
        self._of_host += self.launch_edits(*_CONFIGURED)
        self._leave_out_for_gcc()
        self._scope(0, len(self.words), ())
        self.host = edited(text, self._of_host)
        self.device = edited(text, self._of_device)

    def _note_macros(self) -> None:
        """Note macros such as HD for ``__host__ __device__``, in a text that was not preprocessed."""
        for token in self.every:
            if token.kind == "directive":
                words = re.findall(r"[A-Za-z_]\w*", token.text)
                if words[:1] == ["define"] and (spaces := self._spaces(words[2:])):
                    self._macros.setdefault(words[1], set()).update(spaces)

    def _leave_out_for_gcc(self) -> None:
        """Leave out of the host's part what only nvcc and NVRTC accept."""
        before = "("
        for token in self.every:
            # The host's part needs no headers for the device alone.
            is_unused = token.kind == "directive" and re.match(_DEVICE_HEADER, token.text)
            is_alone = (
                token.text == "__noinline__" and before != "("
            )  # for g++, an attribute's name
            if is_unused or is_alone:
                self._of_host.append((token.start, token.end, ""))
            before = token.text

    def _replace(self, part: list[Edit], begin: int, last: int, text: str = "") -> None:
        """Replace the code from one token to another in a part."""
        tokens = self.tokens
        part.append((tokens[begin].start, tokens[last].end, text))

    def _drop(self, places: Iterable[int], *words: str) -> bool:
        """Leave words out of both parts. Returns whether there are any."""
        found = [at for at in places if self.words[at] in words]
        for at in found:
            self._replace(self._of_host, at, at)
            self._replace(self._of_device, at, at)
        return bool(found)

    def _scope(self, at: int, end: int, names: tuple[str, ...], in_class: bool = False) -> None:
        """Walk the declarations of a namespace or class."""
        begin = at
        while at < end:
            word = self.words[at]
            if word == ";" or (in_class and word == ":" and at == begin + 1):
                if word == ";" and not in_class:
                    self._declaration(begin, at, names)
                begin = at + 1
            elif word == "{":
                at, begin = self._block(begin, at, names, in_class)
                continue
            elif word in CLOSING:
                at = self.closing[at]
            at += 1

    def _block(
        self, begin: int, at: int, names: tuple[str, ...], in_class: bool
    ) -> tuple[int, int]:
        """Handle a brace and the declaration before it.

        Returns the index to continue at, and the start of the declaration in progress.
        """
        close = self.closing[at]
        words = self.words[begin:at]
        if "namespace" in words and "(" not in words:
            self._scope(at + 1, close, (*names, *self._namespace(begin, at)))
            return close + 1, close + 1
        if words[:1] == ["extern"] and self.tokens[at - 1].kind == "string":
            self._scope(at + 1, close, names)
            return close + 1, close + 1
        declared = self.after_template(begin)
        words = self.words[declared:at]
        if words[:1] == ["enum"]:
            return close + 1, begin
        parameters = self.parameters_of(declared, at)
        if parameters < at and self.find(declared, parameters, "=") == parameters:
            self._function(begin, declared, parameters, at, names, in_class)
            return close + 1, close + 1
        if {"struct", "class", "union"} & {*words}:
            if "<<<" in self.words[at:close]:
                raise NvccOnly("it launches a kernel from a method")
            if declared == begin:
                self._note_members(begin, at)
            self._scope(at + 1, close, (*names, "*"), in_class=True)
        return close + 1, begin

    def _namespace(self, begin: int, at: int) -> list[str]:
        """Return the names of the namespace that begins with a brace. An unnamed namespace gets a name."""
        if self.words[at - 1] != "namespace":
            named = self.words.index("namespace", begin) + 1
            return [word for word in self.words[named:at] if word not in ("::", "inline")]
        # nvcc's and NVRTC's names of an unnamed namespace differ
        first = self.tokens[begin].start
        last = self.tokens[at - 1].end
        for part in (self._of_host, self._of_device):
            part += [(first, first, "inline "), (last, last, f" {self.unnamed}")]
        return [self.unnamed]

    def _spaces(self, words: Iterable[str]) -> set[str]:
        found = {*words}
        return (_SPACES & found).union(*(self._macros[one] for one in found & self._macros.keys()))

    def _function(
        self,
        begin: int,
        declared: int,
        parameters: int,
        body: int,
        names: tuple[str, ...],
        in_class: bool,
    ) -> None:
        spaces = self._spaces(self.words[at] for at in self.outer(declared, parameters))
        last = self.closing[body]
        if body in self._kernels:
            self._kernel(declared, self._kernels[body], names)
        elif "__device__" in spaces:
            if "<<<" in self.words[body:last]:
                raise NvccOnly("it launches a kernel from a kernel")
            if "__host__" not in spaces and not spaces & {"constexpr", "consteval"}:
                start = self.find(self.closing[parameters] + 1, body, ":")
                self._replace(self._of_host, start, last, ";")
        elif not in_class and not spaces & {"constexpr", "consteval"}:
            self._replace(self._of_device, begin, last)

    def _kernel(self, declared: int, kernel: KernelDefinition, names: tuple[str, ...]) -> None:
        """Give a kernel external linkage in both parts, and in the host's a body that launches it."""
        if "*" in names:
            raise NvccOnly("a kernel is a member of a class")
        internal = self._external(declared, kernel.parameters)
        notes = self._layouts_of(kernel)
        addresses, pointer = self.own_call(kernel)
        stub = (
            f"{{ {notes}void *opjit_arguments[] = {addresses}; "
            f"opjit_launch((const void *){pointer}, opjit_arguments); }}"
        )
        self._replace(self._of_host, kernel.body, self.closing[kernel.body], stub)
        name = "::".join((*names, self.words[kernel.name]))
        self.kernel_names.add(name)
        if kernel.template:
            self.templates = True
        elif internal:
            self.internal.add(name)

    def _layouts_of(self, kernel: KernelDefinition) -> str:
        """Enter the parameters of a kernel that may be classes. Returns the code that notes their layouts on the host."""
        notes = ""
        checks = ""
        for name, begin, named, end in self.parameters(kernel):
            words = {*self.words[begin:named], *self.words[named + 1 : end]}
            names = {word for word in words if word.isidentifier()}
            if names <= _SCALARS or name.endswith("...") or {"*", "&"} & words:
                continue
            typed = self.code(begin, named).replace("const ", "")
            layout = Layout(typed, name, self._members.get(typed, ()))
            number = len(self.layouts)
            self.layouts.append(layout)
            notes += layout.note(number)
            checks += f" OPJIT_LAYOUT_{number}"
        if checks:
            inside = self.tokens[kernel.body].end
            self._of_device.append((inside, inside, checks + " "))
        return notes

    def _note_members(self, begin: int, opened: int) -> None:
        """Note the members of a struct with offsets that a program may query."""
        if self.words[begin] not in ("struct", "union"):
            return
        members = list[str]()
        start = opened + 1
        for at in self.outer(start, self.closing[opened]):
            if self.words[at] in ("private", "protected"):
                break
            if self.words[at] == ";":
                members += self._declared_members(start, at)
                start = at + 1
        name = self.words[self.find(begin, opened, ":") - 1]
        self._members[name] = tuple(members[:_MAX_MEMBERS])

    def _declared_members(self, begin: int, end: int) -> Iterator[str]:
        """Yield the names that a declaration in a struct declares, but for functions and bit fields."""
        words = [self.words[at] for at in self.outer(begin, end)]
        if len(words) < 2 or _NO_MEMBERS & {*words}:
            return
        yield from filter(str.isidentifier, self.declared_names(begin, end))

    def _external(self, begin: int, end: int) -> bool:
        """Leave out of a kernel's declaration what would keep its name in this file. Returns whether there was something."""
        places = self.outer(begin, end)
        return self._drop(places, "static", "inline", "__inline__", "__forceinline__")

    def _declaration(self, begin: int, end: int, names: tuple[str, ...]) -> None:
        """Handle a declaration of variables or of a function that is defined elsewhere."""
        if begin == end or self.words[begin] in _TYPES:
            return
        declared = self.after_template(begin)
        spaces = self._spaces(self.words[at] for at in self.outer(declared, end))
        parameters = self.parameters_of(declared, end)
        words = self.words[begin:end]
        is_function = declared + 1 < parameters < end
        if "__global__" in spaces:
            is_internal = is_function and self._external(declared, parameters)
            if is_internal and declared == begin:
                self.internal.add("::".join((*names, self.words[parameters - 1])))
        elif spaces & {"__device__", "__constant__"} and not is_function and words[0] != "template":
            self._variable(begin, end, "__constant__" in spaces, names)
        elif spaces or "__shared__" in words:
            return
        elif is_function or (
            parameters == end and len(words) > 1 and "const" not in words and declared == begin
        ):
            self._replace(self._of_device, begin, end - 1)

    def _variable(self, begin: int, end: int, constant: bool, names: tuple[str, ...]) -> None:
        """Note a variable in device memory, and give it external linkage."""
        words = self.words[begin:end]
        if "extern" in words or "constexpr" in words:
            raise NvccOnly("a device variable is extern or constexpr")
        named = self.find(begin, end, "=", "[", "{")
        if self.find(begin, named, ",") < named:
            raise NvccOnly("one declaration has several device variables")
        self._drop(range(begin, named), "static")
        if "const" in words:
            first = self.tokens[begin].start
            self._of_host.append((first, first, "extern "))
        self.variables["::".join((*names, self.words[named - 1]))] = constant
