"""Draws programs in the manner of extensions, aimed at what light headers could get wrong. rules.txt has their text."""

import random
import re
from collections.abc import Callable
from pathlib import Path

from tests.cpp_extension.fuzz.both import Case

DEEP = 4  # rules below take their first production
_SECTION = re.compile(r"^(\w+):\n((?:    .*\n)+)", re.MULTILINE)
RULES = {
    name: [one.replace("\\n", "\n") for one in re.split(r"\s{2,}|\n", text) if one]
    for name, text in _SECTION.findall(
        Path(__file__).with_name("rules.txt").read_text(encoding="utf-8")
    )
}
# C++ types of arguments, the commonest first, each with a default value in C++ or nothing.
TYPES = {kind: value for kind, _, value in (one.partition(" = ") for one in RULES["type"])}
WAYS = {  # to call a function with a tensor
    "errors": [
        "$({})",
        "$({})",
        "faked($, {})",
        "under(Raises(KeyError('k')), $, {})",
        "under(Raises(ValueError('v')), $, {})",
        "under(warnings.catch_warnings(), warned, $, {})",
    ],
    "guards": [
        "grads($, {})",
        "after($, {})",
        "under(torch.no_grad(), grads, $, {})",
        "under(torch.inference_mode(), $, {})",
    ],
    "functions": [
        "grads($, {}, 2.5)",
        "$({}, 1)",
        "under(torch.no_grad(), $, {}, 2)",
        "grads(torch.func.vmap($), {}, 2.5)",
    ],
    "arrays": ["$({}, [4, 5])", "$({}, [])", "$({}, [1, 0, 2])", "$({}, (3,))"],
}
PAIRS = {
    "arithmetics": ["$({})", "$({})", "after($, {})", "grads($, {})"],
    "indexing": ["after($, {})"],
}


class Drawer:
    """Draws one program."""

    def __init__(self, seed: str, name: str) -> None:
        self.rng = random.Random(seed)
        self.name = name

    def expand(self, rule: str, depth: int = 0) -> str:
        def inside(found: re.Match[str]) -> str:
            return self.expand(found[1], depth + 1) if found[1] in RULES else found[0]

        return re.sub(
            r"<(\w+)>", inside, RULES[rule][0] if depth >= DEEP else self.rng.choice(RULES[rule])
        )

    def some(self, rule: str, count: int) -> list[str]:
        return self.rng.sample(RULES[rule], min(count, len(RULES[rule])))

    def types(self, count: int) -> list[str]:
        return [
            self.rng.choice(list(TYPES)[: self.rng.choice([5, 9, 24, len(TYPES)])])
            for _ in range(count)
        ]

    def function(self, kind: str) -> Case:
        """A function of tensors. Its binding translates errors as torch does, or as pybind11 does."""
        bind = self.rng.choice(
            [
                'm.def("@", &$);',
                'm.def("@", torch::wrap_pybind_function($), "$ of drawn");',
                'm.def("@", $, "doc");',
            ]
        )
        if kind in PAIRS:
            calls = [self.rng.choice(PAIRS[kind]).format(pair) for pair in RULES["pair"]]
        else:
            calls = [
                self.rng.choice(WAYS.get(kind, ["$({})"])).format(one)
                for one in self.some("some_tensor", 20)
            ]
        if kind == "traits":
            calls = ["$()"]

        def named(text: str) -> str:
            return text.replace("@", self.name).replace("$", f"{self.name}_f")

        return Case(
            self.name,
            named(self.expand(kind)),
            [named(bind)],
            [call.replace("$", f"m.{self.name}") for call in calls],
        )

    def overloads(self) -> Case:
        arity = self.rng.choice([1, 1, 2])
        code = []
        binds = []
        for number in range(self.rng.randint(2, 4)):
            types = self.types(arity)
            parameters = ", ".join(
                f"{kind} {letter}" for kind, letter in zip(types, "ab", strict=False)
            )
            values = ", ".join("ab"[:arity])
            code.append(
                f'auto o{number}({parameters}) {{ return std::make_tuple(std::string("{parameters}"), {values}); }}'
            )
            binds.append(f'm.def("{self.name}", &o{number}' + self.rng.choice([");", ', "one");']))
        calls = [
            ", ".join([value, *self.some("value", arity - 1)]) for value in self.some("value", 60)
        ]
        return Case(
            self.name,
            "\n".join(code),
            binds,
            [*(f"m.{self.name}({call})" for call in [*calls, ""]), f"m.{self.name}.__doc__"],
        )

    def signature(self) -> Case:
        types = dict(
            zip(
                ["arg_a", "arg_b", "arg_c", "arg_d"],
                self.types(self.rng.randint(1, 4)),
                strict=False,
            )
        )
        first = self.rng.randint(0, len(types))  # the first with a default
        options = [
            f'py::arg("{name}")' + (f" = {TYPES[kind]}" if place >= first and TYPES[kind] else "")
            for place, (name, kind) in enumerate(types.items())
        ]
        options += self.rng.choice(
            [[], [], ['"a docstring"'], ["py::call_guard<py::gil_scoped_release>()"]]
        )
        parameters = ", ".join(f"{kind} {name}" for name, kind in types.items())
        code = f"auto s({parameters}) {{ return std::make_tuple({', '.join(types)}); }}"
        calls = []
        for _ in range(40):
            values = self.some("value", self.rng.randint(0, len(types)))
            words = [
                f"{name}={self.rng.choice(RULES['value'])}"
                for name in [*types, "other"][len(values) :][: self.rng.randint(0, 4)]
            ]
            calls.append(f"m.{self.name}({', '.join([*values, *words])})")
        calls += [
            f"m.{self.name}.__doc__",
            f"repr(m.{self.name}.__name__)",
            f"pickled(m.{self.name}, m)",
            f"m.{self.name}(*[x] * 9)",
        ]
        return Case(self.name, code, [f'm.def("{self.name}", &s, {", ".join(options)});'], calls)

    def library(self) -> Case:
        # Those without a default first.
        arguments = sorted(self.some("schema", self.rng.randint(1, 4)), key=lambda one: "=" in one)
        types = dict(one.split(" : ") for one in arguments)
        parameters = ", ".join(f"{kind} p{place}" for place, kind in enumerate(types.values()))
        returned, kind, value = self.rng.choice(RULES["returned"]).split(" : ")
        key = self.rng.choice(
            ["CompositeExplicitAutograd", "CPU", "CompositeImplicitAutograd", "Autograd"]
        )
        schema = f"op({', '.join(types)}) -> {returned}"
        function = self.rng.choice(["op", "&op", "TORCH_FN(op)"])
        code = (
            f"{kind} op({parameters}) {{ return {value}; }}\n"
            f'TORCH_LIBRARY({self.name}, l) {{ l.def("{schema}"); }}\n'
            f'TORCH_LIBRARY_IMPL({self.name}, {key}, l) {{ l.impl("op", {function}); }}'
        )
        calls = [", ".join(self.some("value", self.rng.randint(0, 3))) for _ in range(15)]
        name = f"torch.ops.{self.name}.op"
        return Case(
            self.name,
            code,
            [],
            [
                *(f"{name}({call})" for call in [*calls, "", "x", "x, x"]),
                f"str({name}.default._schema)",
            ],
        )


def _of(kind: str) -> Callable[[Drawer], Case]:
    return lambda drawer: drawer.function(kind)


KINDS: dict[str, Callable[[Drawer], Case]] = {
    "overloads": Drawer.overloads,
    "signature": Drawer.signature,
    "library": Drawer.library,
    **{
        kind: _of(kind)
        for kind in (
            "arithmetics",
            "arrays",
            "texts",
            "guards",
            "errors",
            "queries",
            "traits",
            "indexing",
            "functions",
            "loops",
            "lookups",
        )
    },
}


def draw(seed: int, number: int) -> Case:
    """The program with a number, which is the same each time. Six programs in a row are of one kind."""
    return list(KINDS.values())[number // 6 % len(KINDS)](
        Drawer(f"{seed} {number}", f"c{seed}x{number}")
    )
