"""Views, indexing and what a tensor says of itself."""

from tests.cpp_extension.corpus.program import Program

PROGRAMS = [
    Program("views/reshape", ["m.views(x)", "m.views(sq[:4])", "m.views(i)", "m.bad_view(x, [2, 10])", "m.bad_view(x, [-1])", "m.repeat(x)", "m.make_contiguous(x)", "grads(m.views, x)", "m.make_contiguous(xt)",
                              "m.bad_view(empty, [0])"],
            ["m.bad_view(xt, [20])", "m.bad_view(x, [3, -1])", "m.bad_view(x, [-1, -1])", "m.views(v)", "m.views(xt)", "m.bad_view(x, 20)"], ["views", "bad_view", "repeat", "make_contiguous"]),
    Program("views/indexing", ["m.reads(x)", "m.reads(i)", "m.reads(strided)", "m.writes(x)", "m.writes(strided.double())", "m.at_index(x, -1)", "m.at_index(v, 2)",
                               "m.put(v, target, v4, True)", "m.put(x, idx.clamp(max=3), v5, False)", "grads(m.reads, x)", "grads(m.writes, x)", "grads(m.put, v, target, v4, True)", "m.writes(i)"],
            ["m.reads(v)", "m.at_index(x, 4)", "m.at_index(x, 1.0)", "m.at_index(scalar, 0)", "m.put(v, target, v3, True)", "m.put(x, x, v, False)", "m.put(v, target, dv, False)"],
            ["reads", "writes", "at_index", "put"]),
    Program("views/split_cat", ["m.pieces(x)", "m.pieces(xt)", "m.join([x, y], 0)", "m.join([x, i], 1)", "m.pile([v3, v3], -1)", "m.both(x, y)", "m.grid(v3, v4)", "m.join([e1, x], 0)", "grads(m.pieces, x)",
                                "m.join([], 0) if False else m.pile((x, y), 1)"],
            ["m.join([x, v], 0)", "m.join([], 0)", "m.join(x, 0)", "m.pile([x, v], 0)", "m.pile([x, None], 0)", "m.both(x, w)", "m.grid(x, x)", "m.join((x, y), 0, 1)"],
            ["pieces", "join", "pile", "both", "grid"]),
    Program("views/gather_scatter", ["m.gather(x, 1, target.view(4, 1))", "m.take(v5, target)", "after(m.scatter_, x, target.view(4, 1), 2.5)", "m.where3(mask, x, y)", "m.where1(mask)", "m.fill_diagonal(sq, 7)",
                                     "grads(m.gather, x, 1, target.view(4, 1))", "grads(m.where3, mask, x, y)", "grads(m.fill_diagonal, sq, 0)", "m.where3(mask, x, double)"],
            ["m.gather(x, 1, target)", "m.gather(x, 1, x)", "m.take(v, target + 9)", "m.scatter_(x, target.view(4, 1) + 9, 1)", "m.where3(i, x, y)", "m.fill_diagonal(v, 1)", "m.scatter_(i, x, 1)"],
            ["gather", "take", "scatter_", "where3", "where1", "fill_diagonal"]),
    Program("views/sliding", ["m.windows(v, 3, 2)", "m.windows(x, 2, 1)", "m.strided(x)", "m.roll(x)", "m.detach(x.requires_grad_())", "m.set(x)", "grads(m.windows, v, 3, 2)", "grads(m.strided, x)"],
            ["m.windows(v, 9, 1)", "m.windows(v, 2, 0)", "m.strided(v[:2])", "m.roll(v)", "m.set(v)"], ["windows", "strided", "roll", "detach", "set"]),
    Program("views/metadata", ["m.numbers(x)", "m.numbers(xt)", "m.numbers(strided[1:])", "m.numbers(half)", "m.numbers(scalar)", "m.flags(x)", "m.flags(i.t())", "m.flags(cx)", "m.flags(x.requires_grad_())",
                               "m.flags(img.to(memory_format=torch.channels_last))", "m.last(x3)", "m.size_at(x, -2)", "m.stride_at(xt, 1)", "m.text(x)", "m.text(bf.t())", "m.text(empty)", "m.text(i8)",
                               "m.text(scalar)", "m.copied(x3)", "m.numbers(torch.eye(2).to_sparse().to_dense())"],
            ["m.size_at(x, 2)", "m.stride_at(x, -3)", "m.last(scalar)", "m.flags(x.numpy())", "m.numbers(torch.eye(2).to_sparse())", "m.size_at(x, 'a')"],
            ["numbers", "flags", "last", "size_at", "stride_at", "text", "copied"]),
    Program("views/convert", ["m.converted(x)", "m.converted(xt)", "m.converted(i8)", "m.to_dtype(x, torch.float16)", "m.to_dtype(i, torch.complex64)", "m.dtype_of(bf)", "m.dtype_of(mask)", "m.device_of(x)",
                              "m.to_device(x, torch.device('cpu'))", "m.to_device(x, 'cpu')", "m.promoted(i, half)", "m.promoted(mask, u8)", "m.copied(x, v5)", "m.copied(i, x)", "grads(m.converted, x)",
                              "grads(m.copied, x, v5)"],
            ["m.to_dtype(x, 'float16')", "m.to_dtype(x, 6)", "m.to_device(x, 'nowhere')", "m.copied(x, v4)", "m.to_dtype(x, None)", "m.device_of(1)"],
            ["converted", "to_dtype", "dtype_of", "device_of", "to_device", "promoted", "copied"]),
]
