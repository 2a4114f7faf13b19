"""Reductions."""

from tests.cpp_extension.corpus.program import Program

PROGRAMS = [
    Program("reductions/sum_naive", ["m.sum_all(x)", "m.sum_all(xt)", "m.sum_all(empty)", "m.sum_rows(x)", "m.sum_rows(strided)", "m.sum_rows(empty)"],
            ["m.sum_rows(v)", "m.sum_rows(i)", "m.sum_all(i)"], ["sum_all", "sum_rows"]),
    Program("reductions/dims", ["m.sums(x, [1], False)", "m.sums(x3[0], [0, 1], True)", "m.sums(xt, [-1], True)", "m.variance(x, 0)", "m.product(x)", "m.product(i)",
                                "grads(m.sums, x, [0], True)", "grads(m.variance, x, 1)", "m.sums(empty, [1], False)"],
            ["m.sums(x, [2], False)", "m.sums(x, 1, False)", "m.sums(i, [0], True)", "m.sums(x, [0, 0], True)", "m.sums(x, ['a'], True)", "m.variance(x, 3)"],
            ["sums", "variance", "product"]),
    Program("reductions/minmax", ["m.max_dim(x, 1)", "m.max_dim(i, -2)", "m.both(x)", "m.both(xt)", "m.maximum(x, y)", "m.largest(x)", "m.argmax_pair(x)", "grads(m.max_dim, x, 0)",
                                  "grads(m.maximum, x, y)"],
            ["m.max_dim(x, 2)", "m.both(empty)", "m.largest(empty)", "m.maximum(x, v)", "m.max_dim(x, 1.5)"], ["max_dim", "both", "maximum", "largest", "argmax_pair"]),
    Program("reductions/topk_sort", ["m.top(x, 2)", "m.top(i32, 0)", "m.sorted(x, True)", "m.sorted(i.t(), False)", "m.uniq(i32)", "m.kth(x, 2)", "m.med(x)", "grads(m.top, x, 3)"],
            ["m.top(x, 9)", "m.top(x, -1)", "m.kth(x, 0)", "m.sorted(x)", "m.top(x, 2**40)"], ["top", "sorted", "uniq", "kth", "med"]),
    Program("reductions/norms", ["m.l2(x)", "m.lp(x, 1, 0)", "m.lp(xt, 3.5, -1)", "m.frobenius(x)", "m.normalize_l2(x)", "m.inf_norm(x)", "grads(m.l2, x)", "grads(m.normalize_l2, x)",
                                 "m.l2(empty)", "m.l2(cx)"],
            ["m.l2(i)", "m.inf_norm(empty)", "m.lp(x, 2)"], ["l2", "lp", "frobenius", "normalize_l2", "inf_norm"]),
    Program("reductions/dot", ["m.dot(v, u)", "m.dot(e1, e1)", "m.dot_scalar(v, u)", "m.dot_scalar(i[0], i[1])", "m.outer(v, v3)", "grads(m.outer, v3, v4)", "m.outer(x[:, 0], x[0])"],
            ["m.dot(v, v4)", "m.dot(x, x)", "m.dot_scalar(v, v4)", "m.outer(x, v)", "m.dot(v, dv)"], ["dot", "dot_scalar", "outer"]),
    Program("reductions/histogram", ["m.histogram(x, 5, -2, 2)", "m.histogram(xt, 3, 0, 1)", "m.histogram(empty, 2, 0, 1)", "m.histogram(i, 4, -9, 14)", "m.bincount(target)"],
            ["m.histogram(x, 0, 0, 1)", "m.histogram(x, 4, 1, 0)", "m.histogram(x, 2.5, 0, 1)", "m.bincount(x)", "m.bincount(i.flatten())"], ["histogram", "bincount"]),
    Program("reductions/logsumexp", ["m.logsumexp_rows(x)", "m.logsumexp_rows(double.t())", "m.logsumexp_rows(empty)", "m.reference(x)", "grads(m.reference, x)"],
            ["m.logsumexp_rows(v)", "m.logsumexp_rows(i)", "m.logsumexp_rows(half)", "m.reference(v)"], ["logsumexp_rows", "reference"]),
    Program("reductions/any_all", ["m.any_nan(x)", "m.any_nan(x / 0 - x / 0)", "m.all_positive(pos)", "m.close(x, x + 1e-9, 1e-5)", "m.same(x, x.clone())", "m.same(x, y)",
                                   "m.nonzero(mask)", "m.all_positive(empty)"],
            ["m.close(x, double, 1e-5)", "m.any_nan(3)", "m.close(x, x)"], ["any_nan", "all_positive", "close", "same", "nonzero"]),
    Program("reductions/welford", ["m.welford(x)", "m.welford(i)", "m.welford(empty)", "m.welford(xt)"], ["m.welford()", "m.welford(x, 1)", "m.welford((x,))"], "welford"),
]
