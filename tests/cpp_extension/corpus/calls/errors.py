"""What is thrown, and as what it reaches Python."""

from tests.cpp_extension.corpus.program import Program

PROGRAMS = [
    Program("errors/kinds",
            ["getattr(m, 'raise')(-1)", "getattr(m, 'raise')(99)", "getattr(m, 'raise')(True - 2)"],
            [f"getattr(m, 'raise')({number})" for number in range(29)], ["raise"]),
    Program("errors/kinds_plain",
            ["getattr(m, 'raise')(9)", "getattr(m, 'raise')(-1)", "getattr(m, 'raise')(True + 9)"],
            [*(f"getattr(m, 'raise')({number})" for number in range(9)), "m.bad_shapes(x, x)", "m.bad_shapes(x, 1)"]),
    Program("errors/nested",
            ["m.caught(x)", "m.caught(v)", "m.message(v)", "m.message(x)", "m.index_error(x)", "m.value_error()",
             "m.rethrown(sq[:3, :3].contiguous())", "m.message(x3)", "m.index_error(scalar)"],
            ["m.rethrown(x)", "m.caught(1)"], ["caught", "message", "rethrown", "index_error", "value_error"]),
    Program("errors/aten",
            ["m.mm(x, w)", "m.cat([x, y])", "m.bad_data(i32)", "m.bad_accessor(x3)", "m.bad_item(scalar)", "m.dispatch(x)",
             "m.undefined_dim()"],
            ["m.mm(x, x)", "m.mm(i, x)", "m.cat([])", "m.cat([x, v])", "m.far(x)", "m.bad_dim(x)", "m.bad_data(x)", "m.bad_accessor(x)",
             "m.bad_accessor(x3.double())", "m.bad_item(x)", "m.undefined_add(x)", "m.dispatch(half)", "m.dispatch(mask)", "m.leaf(x)",
             "m.undefined_type()", "m.bad_data(e1)"],
            ["mm", "cat", "far", "bad_dim", "bad_data", "bad_accessor", "bad_item", "undefined_add", "dispatch", "leaf", "undefined_dim",
             "undefined_type"]),
    Program("errors/warn",
            ["m.warned(x)", "m.warned(e1)", "m.warned_once(x)", "m.warned_once(x)"],
            ["m.warned_and_failed()", "m.warned()"], ["warned", "warned_once", "warned_and_failed"]),
    Program("errors/checks_macros",
            ["m.needs_same(x, y)", "m.needs_2d(xt)", "m.needs_positive(x, 2)"],
            ["m.needs_cuda(x)", "m.needs_same(x, double)", "m.needs_same(i, x)", "m.needs_2d(v)", "m.needs_2d(x3)",
             "m.needs_positive(xt, -1)", "m.needs_positive(e1, 0)", "m.needs_positive(x, 3)", "m.needs_positive(x, 12)"],
            ["needs_cuda", "needs_same", "needs_2d", "needs_positive"]),
]
