"""TORCH_LIBRARY programs."""

from tests.cpp_extension.corpus.program import Program

PROGRAMS = [
    Program("library/basic",
            ["m.myadd(x, y)", "m.scale(x)", "m.scale(xt, 3)", "m.scale(x, s=0.5)", "m.both(x, None)", "m.both(x, v5)",
             "m.myadd.default._schema", "m.both.default._schema", "grads(m.scale, x)"],
            ["m.myadd(x, v)", "m.myadd(x)", "m.scale('a')", "m.scale(x, x)", "m.both(x)", "m.missing(x)"], library="corpus_basic"),
    Program("library/impl",
            ["m.relu(x)", "m.relu(x.to('meta'))", "after(m.fill_, x, 2)", "m.split(x, 2)", "m.relu(strided)", "grads(m.relu, x)",
             "after(m.fill_, i, 2.5)"],
            ["m.relu(1)", "m.fill_(x.to('meta'), 1)", "m.split(x, 0)", "m.split(x, 'a')", "m.relu(x, out=x)"], library="corpus_impl"),
    Program("library/fragment",
            ["m.neg(x)", "m.lists([x, y], [0])", "m.lists([x, y], [0, 1], 'mean', True)", "m.lists([x], [1], flag=True)",
             "grads(m.neg, x)"],
            ["m.lists(x, [0])", "m.lists([x, v], [0])", "m.neg()", "m.lists([x], 0, 3)"], library="corpus_fragment"),
    Program("library/autograd",
            ["m.cube(x)", "grads(m.cube, x)", "m.cube(xt)", "m.cube(empty)"],
            ["m.cube(x.to('meta'))", "m.cube('a')", "m.cube(None)"], library="corpus_autograd"),
    Program("library/with_module",
            ["m.direct(x)", "m.dispatched(xt)", "torch.ops.corpus_with_module.twice(x)", "grads(m.dispatched, x)"],
            ["m.direct(1)", "m.dispatched(None)", "torch.ops.corpus_with_module.twice(1)"]),
    Program("library/custom_class",
            ["(lambda s: [s.push(5), m.depth(s), s.pop(), s.pop()])(torch.classes.corpus_custom_class.Stack([1, 2]))",
             "m.depth(torch.classes.corpus_custom_class.Stack([]))", "str(m.depth.default._schema)"],
            ["torch.classes.corpus_custom_class.Stack([]).pop()", "m.depth(3)", "torch.classes.corpus_custom_class.Stack('a')",
             "torch.classes.corpus_custom_class.Stack([1]).push('a')"], library="corpus_custom_class"),
]
