"""Bindings of a program's own."""

from tests.cpp_extension.corpus.program import Program

PROGRAMS = [
    Program("bindings/tutorial", ["m.d_sigmoid(x)", "m.d_sigmoid(xt)", "m.d_sigmoid(empty)", "grads(m.d_sigmoid, x)"], ["m.d_sigmoid()", "m.d_sigmoid(1.0)", "m.d_sigmoid(z=x)"]),
    Program("bindings/defaults", ["m.scaled(x)", "m.scaled(x, 3)", "m.scaled(x, times=2)", "m.scaled(x=x, mode='add', negate=True)", "m.biased(x)", "m.biased(x, bias=v5)", "m.biased(bias=None, x=x)", "m.shape()", "m.shape([3])",
                                  "m.keyword_only(x, a=2)", "m.not_none(x)", "m.exact(1.5)", "m.__doc__", "m.scaled(i, 2, 3, True, 'mul')"],
            ["m.scaled()", "m.scaled(x, mode='div')", "m.scaled(x, y=3)", "m.scaled(x, 1, scale=2)", "m.keyword_only(x, 2)", "m.not_none(None)", "m.exact(1)", "m.biased(None)", "m.scaled(x, None)"]),
    Program("bindings/lambdas", ["(m.x, m.name, m.pi)", "m.twice(x)", "m.sum(x)", "m.count()", "m.count()", "m.plus(2)", "m.none()", "m.twice(xt)"], ["m.sum(cx)", "m.twice()", "m.plus('a')", "m.missing"]),
    Program("bindings/overloads", ["m.add(x, y)", "m.add(x, 2)", "m.add('a', 'b')", "m.mul(2, 3)", "m.mul(2.5, 2)", "m.mul(True, 2)", "m.add(x, 2.5)"],
            ["m.add(x, 'a')", "m.add(1, 2)", "m.mul('a', 1)", "m.add(x, None)", "m.add(x, v)"]),
    Program("bindings/release_gil", ["m.slow_sum(x)", "m.released()", "m.held()", "m.wrapped()", "m.wrapped_no_gil()", "m.scoped(xt)", "m.slow_sum(empty)"],
            ["m.slow_sum(1)", "m.fails(x)", "m.slow_sum(cx) if False else m.slow_sum(None)", "m.fails()"]),
    Program("bindings/gil_inline", ["m.has_gil()", "m.gil_in_parallel(100)", "m.gil_in_parallel(0)"], ["m.has_gil(1)", "m.gil_in_parallel('a')"], ["has_gil", "gil_in_parallel"]),
    Program("bindings/classes", ["(lambda c: [c.increment(), c.value(), c.step, len(c), repr(c), c.public_field])(m.Counter(v3))", "(lambda c: [c.increment(times=3), c.value()])(m.Counter(start=x, step=2))",
                                 "m.Counter.zero().value()", "m.Counter(v3) == m.Counter(v3)", "m.run(m.Counter(x), m.Mode.Exact)", "m.run(m.Counter(x))", "[m.Mode.Fast, int(m.Exact), str(m.Mode.Fast), m.Mode(2).name]",
                                 "(lambda c: [setattr(c, 'step', 5), setattr(c, 'public_field', 2), c.fixed, c.public_field])(m.Counter(v))", "m.Counter.__doc__", "m.Counter.increment.__doc__", "m.Mode.__members__"],
            ["m.Counter(v3, 0)", "m.Counter()", "m.Counter(1)", "m.run(3)", "m.run(m.Counter(x), 1)", "setattr(m.Counter(v3), 'fixed', 1)", "m.Counter(v3).increment('a')", "m.Mode(3)", "setattr(m.Counter(v3), 'other', 1)",
             "setattr(m.Counter(v3), 'step', 'a')"]),
    Program("bindings/inheritance", ["m.run([m.Scale(2), m.Bias(v5)], x)", "m.run([], x)", "m.Scale(3).forward(xt)", "[m.Scale(1).name(), m.Bias(v).name()]", "isinstance(m.Scale(1), m.Layer)", "m.Scale(2.5).by",
                                     "grads(m.run, [m.Scale(2)], x)"],
            ["m.Layer()", "m.run([1], x)", "m.run([m.Bias(v4)], x)", "m.Scale('a')", "m.run([None], x)"]),
    Program("bindings/submodule", ["m.ops.square(x)", "m.ops.cube(xt)", "m.square_plus(x, y=y)", "m.ops.__doc__", "m.ops.square.__doc__"], ["m.ops.square(3)", "m.square_plus(x)", "m.ops.missing"]),
    Program("bindings/implicit_header", ["m.saxpy(2, x, y)", "m.saxpy(0.5, xt, y.t())", "m.saxpy(1, empty, empty)", "grads(m.saxpy, 2, x, y)"], ["m.saxpy(x, y, 2)", "m.saxpy(2, x)", "m.saxpy(2, x, v)"]),
    Program("bindings/docs", ["m.forward.__doc__", "m.backward.__doc__", "m.forward(x, 2)", "m.forward.__name__", "m.backward(x, None, [0], (2, 0.5))"],
            ["m.forward(x)", "m.backward(x, None, [0], (2,))", "m.backward(x, None, 0, (2, 1))", "m.backward(x, x, [0], [1.5, 2])"],
            {"forward": "the forward pass", "backward": "the backward pass: `grad`, 100%"}),
    Program("bindings/numpy_buffer", ["m.from_array(x.numpy())", "m.from_array(xt.numpy())", "m.from_array(double.numpy())", "m.from_array([1, 2])", "m.strings({'a': [1]})", "m.from_array(3)"],
            ["m.from_array('abc')", "m.strings({1: [1]})", "m.strings([1])"]),
]
