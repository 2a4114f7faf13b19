"""Tensors that a program makes."""

from tests.cpp_extension.corpus.program import Program

PROGRAMS = [
    Program("factories/basic",
            ["m.all(3)", "m.all(2)", "m.allocated(0)", "m.allocated(4)", "m.strided(3)"],
            ["m.all(-1)", "m.all(2.5)", "m.strided('a')"], ["all", "allocated", "strided"]),
    Program("factories/options",
            ["m.forms(x)", "m.forms(double)", "m.same_options(x, y)", "m.same_options(x, double)", "m.describe(x)", "m.describe(bf)",
             "m.describe(cx)", "m.describe(mask)"],
            ["m.forms()", "m.describe(3)", "m.same_options(x, None)"], ["forms", "same_options", "describe"]),
    Program("factories/like",
            ["m.like(x)", "m.like(xt)", "m.like(strided)", "m.like(i)", "m.like(empty)", "m.like_double(half)",
             "m.keep_format(x3.transpose(0, 1))", "m.like(img.to(memory_format=torch.channels_last))",
             "m.keep_format(x[:1].expand(3, 5))"],
            ["m.like(x, 1)", "m.like([x])", "m.keep_format(None)"], ["like", "like_double", "keep_format"]),
    Program("factories/from_data",
            ["m.literal()", "m.literals()", "m.blob(4)", "m.blob(0)", "m.blob_strided()", "m.blob_deleter(5)", "m.from_list([1, 2.5])",
             "m.from_list([])", "m.from_ints((1, 2, 3))"],
            ["m.literal(1)", "m.from_list(['a'])", "m.from_ints([1.5])", "m.blob(2.5)", "m.from_ints(3)", "m.from_list(v)"],
            ["literal", "literals", "blob", "blob_strided", "blob_deleter", "from_list", "from_ints"]),
    Program("factories/random",
            ["m.seeded(1)", "m.seeded(7)", "m.noise(x)", "m.with_generator(3)", "m.noise(empty)", "grads(m.noise, x)"],
            ["m.seeded(1.5)", "m.noise(i)", "m.with_generator()"], ["seeded", "noise", "with_generator"]),
]
