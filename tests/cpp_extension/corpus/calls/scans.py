"""Scans and recurrences."""

from tests.cpp_extension.corpus.program import Program

PROGRAMS = [
    Program("scans/cumsum",
            ["m.cumsum(x, 0)", "m.cumsum(i32, -1)", "m.cumsum_naive(v)", "m.cumsum_naive(x[:, 1])", "m.cumsum_naive(e1)",
             "m.exclusive(x)", "m.reverse_cumsum(xt)", "m.masked_cumsum(x, mask)", "grads(m.exclusive, x)", "grads(m.reverse_cumsum, x)"],
            ["m.cumsum(x, 2)", "m.cumsum_naive(x)", "m.cumsum_naive(dv)", "m.exclusive(v)", "m.cumsum(mask, 'a')"],
            ["cumsum", "cumsum_naive", "exclusive", "reverse_cumsum", "masked_cumsum"]),
    Program("scans/cumprod",
            ["m.cumprod_rows(x)", "m.cumprod_rows(i)", "m.cumprod_rows(u8.t())", "m.cummax(x)", "m.cumprod_rows(empty)",
             "grads(m.cummax, x)"],
            ["m.cumprod_rows(v)", "m.cumprod_rows(half)", "m.cummax(cx)"], ["cumprod_rows", "cummax"]),
    Program("scans/ema",
            ["m.ema(x, 0.5)", "m.ema(empty, 1)", "m.ema_list(x, 0.25)", "grads(m.ema_list, x, 0.5)", "grads(m.ema, x, 0.5)",
             "m.ema(xt, 0.1)"],
            ["m.ema(x, 0)", "m.ema(scalar, 0.5)", "m.ema_list(empty, 0.5)", "m.ema(x)"], ["ema", "ema_list"]),
    Program("scans/ssm",
            ["m.selective_scan(x3, x3.abs(), v5.abs().neg())", "grads(m.selective_scan, x3, x3, v5)",
             "m.selective_scan(x3[:0], x3[:0], v5)"],
            ["m.selective_scan(x3, x3, v4)", "m.selective_scan(x, x, v5)", "m.selective_scan(x3[:, :0], x3, v5)"], ["selective_scan"]),
    Program("scans/fibonacci",
            ["m.fib(10)", "m.fib(True)", "m.fib_tensor(6)", "m.fib_tensor(0)", "m.fib_list(7)", "m.fib(scalar)"],
            ["m.fib(-1)", "m.fib(2.0)", "m.fib('3')", "m.fib(2**70)"], ["fib", "fib_tensor", "fib_list"]),
    Program("scans/segment",
            ["m.segment_sum(x, target, 5)", "m.scatter_max(x, target, 6)", "m.scatter_add(x, target, 5)", "m.one_hot(target, 5)",
             "grads(m.segment_sum, x, target, 5)", "m.one_hot(target[:0], 3)", "m.scatter_max(i, target, 5)"],
            ["m.segment_sum(x, target, 2)", "m.one_hot(target, 2)", "m.segment_sum(x, target.float(), 5)",
             "m.scatter_add(x, target[:2], 5)"], ["segment_sum", "scatter_max", "scatter_add", "one_hot"]),
]
