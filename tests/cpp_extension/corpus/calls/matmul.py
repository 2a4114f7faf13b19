"""Matrix products."""

from tests.cpp_extension.corpus.program import Program

PROGRAMS = [
    Program("matmul/naive",
            ["m.matmul_naive(x, w)", "m.matmul_naive(x, xt)", "m.matmul_naive(empty, w)", "m.matmul_naive(strided, w)"],
            ["m.matmul_naive(x, x)", "m.matmul_naive(v, v)", "m.matmul_naive(double, w)", "m.matmul_naive(x, w, w)"], ["matmul_naive"]),
    Program("matmul/tiled",
            ["m.matmul_tiled(x, w)", "m.matmul_tiled(sq, sq)", "m.matmul_tiled(empty, w)"],
            ["m.matmul_tiled(xt, x)", "m.matmul_tiled(double, double)", "m.matmul_tiled(x, half.t())"], ["matmul_tiled"]),
    Program("matmul/aten",
            ["m.mm(x, w)", "m.linear(x, w35, None)", "m.linear(x, w35, v3)", "m.bmm(x3, y3)", "m.addmm(v3, x, w)",
             "m.einsum('ij,jk->ki', [x, w])", "m.einsum('bij->b', [x3])", "m.mv(x, v5)", "grads(m.linear, x, w35, v3)",
             "grads(m.bmm, x3, y3)", "grads(m.addmm, v3, x, w)", "m.mm(empty, w)", "m.mm(i, i.t())"],
            ["m.mm(x, x)", "m.linear(x, w35)", "m.linear(x, w35, v4)", "m.bmm(x, x)", "m.einsum('ij,jk', [x])", "m.einsum(1, [x])",
             "m.mv(x, v4)", "m.mm(x, double.t())", "m.einsum('ij', x)"], ["mm", "linear", "bmm", "addmm", "einsum", "mv"]),
    Program("matmul/batched",
            ["m.batched(x3, y3)", "m.batched(x3.double(), y3.double())", "m.batched(x3[:0], y3[:0])",
             "m.batched(y3.transpose(1, 2), x3.transpose(1, 2))", "grads(m.batched, x3, y3)"],
            ["m.batched(x, y3)", "m.batched(x3, y3[:1])", "m.batched(x3, x3)", "m.batched(x3, y3.double())"], ["batched"]),
    Program("matmul/gemm_template",
            ["m.gemm(x, w, torch.ones(4, 3), 0.5)", "m.gemm(sq, sq, sq, 1)", "m.gemm(xt, x, torch.zeros(5, 5), 2)",
             "m.gemm(double, double.t(), torch.zeros(4, 4).double(), -1)"],
            ["m.gemm(half, half, half, 1)", "m.gemm(x, double, sq, 1)", "m.gemm(x, w, w)", "m.gemm(i, i, i, 1)"], ["gemm"]),
    Program("matmul/int8",
            ["m.int8_matmul(i8, i8.t(), 0.5)", "m.quantize(x)", "m.int8_matmul(i8[:0], i8.t(), 1)", "m.quantize(xt)"],
            ["m.int8_matmul(u8, i8, 1)", "m.quantize(empty)", "m.int8_matmul(i8[0], i8, 1)"], ["int8_matmul", "quantize"]),
    Program("matmul/transpose",
            ["m.transpose_blocked(x)", "m.transpose_blocked(xt)", "m.transpose_blocked(mask)", "m.transpose_blocked(i32)",
             "m.transpose_blocked(empty)"],
            ["m.transpose_blocked(v)", "m.transpose_blocked(half)", "m.transpose_blocked(cx)"], "transpose_blocked"),
]
