"""Mistakes that authors of kernels make, each in an op that is right but for it, and what `opjit test` says of it."""

import textwrap
from pathlib import Path
from typing import NamedTuple

OP_PY = """\
import torch
import opjit

@opjit.op("mistakes::{name}(Tensor x) -> Tensor")
def {name}(x):
    return {fake}

{name}.reference(lambda x: {reference})

@{name}.samples
def samples(device):
    for dtype in (torch.float32, torch.float64):
        yield torch.linspace(-2, 3, 24, dtype=dtype, device=device).reshape(4, 6)
        yield torch.linspace(-2, 3, 7, dtype=dtype, device=device)
        yield torch.ones(0, 3, dtype=dtype, device=device)
{more}
"""
KERNEL = """\
#include "opjit.h"
#include <assert.h>
#include <stdlib.h>

{before}
{body}
opjit_status {name}_cpu(const opjit_tensor *x, opjit_tensor *out)
{{
    const int64_t n = x->numel;
    (void)n;
{check}
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    if (x->dtype == OPJIT_FLOAT32)
        OPJIT_TRY(compute_float(x, out));
    else if (x->dtype == OPJIT_FLOAT64)
        OPJIT_TRY(compute_double(x, out));
    else
        OPJIT_FAIL("{name} does not take %s", opjit_dtype_name(x->dtype));
{after}
    return OPJIT_OK;
}}
"""
# Once for float and once for double, not in a macro, whose lines a compiler takes for one.
COMPUTE = """\
static opjit_status compute_{scalar}(const opjit_tensor *x, opjit_tensor *out)
{{
    typedef {scalar} scalar_t;
    const int64_t n = x->numel;
    scalar_t *from = (scalar_t *)x->data;
    scalar_t *to = (scalar_t *)out->data;
    (void)from;
    (void)to;
{body}
    return OPJIT_OK;
}}

"""
BODY = """\
for (int64_t i = 0; i < n; i++)
    to[i] = 2 * from[opjit_offset(x, i)];
"""
CONTIGUOUS = 'OPJIT_CHECK(x->contiguous, "expected a contiguous tensor");'
BACKWARD = """
{name}.setup_context(lambda ctx, inputs, output: None)
{name}.backward(lambda ctx, grad: 2 * grad)
"""


class Mistake(NamedTuple):
    """One mistake.

    Attributes:
        told: matches the failed line, or the author's place below it; ``@`` is the line of the kernel that has ``/* here */``.
        body: computes ``to`` from ``from``.
        check, after: statements before the result exists, and at the end.
        before: at the file's top.
        kernel: replaces the whole file.
        more: the rest of op.py.
    """

    name: str
    told: str
    body: str = BODY
    check: str = ""
    after: str = ""
    before: str = ""
    kernel: str = ""
    fake: str = "x.new_empty(x.shape)"
    reference: str = "2 * x"
    more: str = ""

    def write(self, folder: Path) -> Path:
        """Write the op's folder. Returns it."""
        folder.mkdir()
        values = self._asdict() | {"more": self.more.format(name=self.name)}
        (folder / "op.py").write_text(OP_PY.format(**values), encoding="utf-8")
        pieces = {
            name: textwrap.indent(textwrap.dedent(values[name]), " " * 4)
            for name in ("body", "check", "after")
        }
        pieces["body"] = "".join(
            COMPUTE.format(scalar=scalar, body=pieces["body"]) for scalar in ("float", "double")
        )
        text = self.kernel or KERNEL.format(**values | pieces)
        (folder / f"{self.name}.c").write_text(text, encoding="utf-8")
        return folder

    def pattern(self, folder: Path) -> str:
        """`told` with the number of the line."""
        lines = (folder / f"{self.name}.c").read_text(encoding="utf-8").splitlines()
        here = "|".join(str(number) for number, line in enumerate(lines, 1) if "/* here */" in line)
        return self.told.replace("@", rf"{self.name}\.c:({here}): ")


MISTAKES = [
    # Memory
    Mistake(
        "write_past_the_end",
        r"@heap-buffer-overflow, WRITE of size [48], 0 bytes (after|to the right of) a \d+-byte region",
        after="((float *)out->data)[n * (int64_t)(x->dtype == OPJIT_FLOAT32 ? 1 : 2)] = 1; /* here */",
    ),
    Mistake(
        "read_past_the_end",
        "@heap-buffer-overflow, READ of size [48]",
        check=CONTIGUOUS,
        body="""
        volatile scalar_t next = 0;
        for (int64_t i = 0; i < n; i++) {
            to[i] = 2 * from[i];
            next = from[i + 1]; /* here */
        }
        (void)next;
        """,
    ),
    Mistake(
        "write_before_the_start",
        "@heap-buffer-overflow, WRITE of size [48], .*before",
        body=BODY + "to[-1] = 0; /* here */",
    ),
    Mistake(
        "past_a_local_array",
        "@(stack-buffer-overflow, WRITE|index 8 out of bounds)",
        check=CONTIGUOUS,
        body="""
        scalar_t tile[8];
        for (int64_t i = 0; i < n; i++) {
            tile[i % 9] = 2 * from[i]; /* here */
            to[i] = tile[i % 9];
        }
        """,
    ),
    Mistake(
        "past_a_table",
        "@(global-buffer-overflow|index 4 out of bounds)",
        before="static const float factors[4] = {2, 2, 2, 2};",
        body="""
        for (int64_t i = 0; i < n; i++)
            to[i] = factors[i % 5] * from[opjit_offset(x, i)]; /* here */
        """,
    ),
    Mistake(
        "use_after_free",
        "@heap-use-after-free, READ",
        body="""
        scalar_t *copy = malloc((n + 1) * sizeof *copy);
        for (int64_t i = 0; i < n; i++)
            copy[i] = 2 * from[opjit_offset(x, i)];
        free(copy);
        for (int64_t i = 0; i < n; i++)
            to[i] = copy[i]; /* here */
        """,
    ),
    Mistake(
        "freed_twice",
        "@double-free",
        body="char *volatile copy = malloc(100);\nfree(copy);\n" + BODY + "free(copy); /* here */",
    ),
    Mistake(
        "leak",
        r"memory .*kept \d+ bytes of host memory per call on \(",
        after="volatile char *kept = malloc(100); kept[0] = 1;",
    ),
    Mistake(
        "leak_before_an_error",
        r"memory .*kept \d+ bytes of host memory per call on \(",
        check="""
        volatile char *copy = malloc(500);
        copy[0] = 1;
        OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 || x->dtype == OPJIT_FLOAT64, "expected float32 or float64");
        free((void *)copy);
        """,
    ),
    Mistake(
        "scratch_too_small",
        "@heap-buffer-overflow, WRITE of size",
        check=CONTIGUOUS,
        body="""
        void *memory;
        OPJIT_TRY(opjit_scratch(&memory, n * 2, x));
        scalar_t *copy = memory;
        for (int64_t i = 0; i < n; i++)
            copy[i] = 2 * from[i]; /* here */
        memcpy(to, copy, n * sizeof *to);
        """,
    ),
    Mistake(
        "smaller_other_input",
        "@heap-buffer-overflow, READ",
        kernel="""\
#include "opjit.h"

opjit_status smaller_other_input_cpu(const opjit_tensor *x, const opjit_tensor *y, opjit_tensor *out)
{
    OPJIT_CHECK(x->contiguous && y->contiguous, "expected contiguous tensors");
    OPJIT_CHECK(x->dtype == OPJIT_FLOAT32 && y->dtype == OPJIT_FLOAT32, "expected float32");
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)out->data)[i] = ((float *)x->data)[i] + ((float *)y->data)[i]; /* here */
    return OPJIT_OK;
}
""",
        more="""
{name} = opjit.op("mistakes::{name}(Tensor x, Tensor y) -> Tensor")(lambda x, y: x.new_empty(x.shape))
{name}.reference(lambda x, y: x + y)
{name}.samples(lambda device: iter([(torch.ones(4, 5), torch.ones(4, 5)), (torch.ones(4, 5), torch.ones(5))]))
""",
    ),
    Mistake(
        "last_size_of_a_scalar",
        "@use-after-poison, READ of size 8",
        after="""
        volatile int64_t last = x->sizes[x->dim - 1]; /* here */
        (void)last;
        """,
    ),
    Mistake(
        "stride_behind_the_last",
        "@use-after-poison, READ of size 8",
        after="""
        volatile int64_t next = x->strides[x->dim]; /* here */
        (void)next;
        """,
    ),
    # The process
    Mistake(
        "null_pointer",
        "SIGSEGV on ",
        check=CONTIGUOUS,
        body="""
        if (n == 0)
            *(volatile scalar_t *)NULL = 0; /* here */
        """
        + BODY,
    ),
    Mistake(
        "wild_pointer", "@SEGV, WRITE", body="((volatile float *)8)[n] = 0; /* here */\n" + BODY
    ),
    Mistake(
        "endless_recursion",
        "stack-overflow",
        before="""\
static double deeper(volatile double *x)
{
    volatile double next[8] = {x[0] + 1};
    return deeper(next) + next[0]; /* here */
}
""",
        body="volatile double start[8] = {0};\nif (n == 7) to[0] = deeper(start);\n" + BODY,
    ),
    Mistake(
        "endless_loop",
        r"did not return within 10 s on \(float32 \(7,\)\)",
        body="""
        for (volatile int64_t i = n; i == 7;) { /* here */
        }
        """
        + BODY,
    ),
    Mistake("abort", "died of SIGABRT on ", check="if (x->dim == 1) abort(); /* here */"),
    Mistake(
        "failed_assert",
        r"died of SIGABRT on \(.*Assertion .n % 2 == 0",
        check="assert(n % 2 == 0); /* here */",
    ),
    Mistake("exit_0", r"exit\(0\) on ", check="if (x->dim == 1) exit(0); /* here */"),
    Mistake(
        "division_by_zero",
        "@division by zero",
        check="volatile int64_t rows = n / (x->dim ? x->sizes[0] : 1); /* here */\n(void)rows;",
    ),
    # Arithmetic
    Mistake(
        "signed_overflow",
        "@signed integer overflow",
        check="volatile int bytes = (int)n * 100000000; /* here */\n(void)bytes;",
    ),
    Mistake(
        "shift_too_far",
        "@shift exponent",
        check="volatile int64_t mask = 1 << (int)(n + 20); /* here */\n(void)mask;",
    ),
    Mistake(
        "misaligned",
        "@(load of|store to) misaligned address",
        check=CONTIGUOUS,
        body="""
        typedef scalar_t four __attribute__((vector_size(4 * sizeof(scalar_t))));
        int64_t i = 0;
        for (; i + 4 <= n; i += 4)
            *(four *)(to + i) = 2 * *(four *)(from + i); /* here */
        for (; i < n; i++)
            to[i] = 2 * from[i];
        """,
    ),
    Mistake(
        "float_for_double",
        r"got .*, expected .* on \(float64",
        reference="0.1 * x",
        body=BODY.replace("2 * from", "(scalar_t)0.1f * from"),
    ),
    Mistake(
        "nan_lost",
        r"got 0.*, expected nan at .*with nan in tensor 0",
        reference="torch.relu(x)",
        body="""
        for (int64_t i = 0; i < n; i++)
            to[i] = from[opjit_offset(x, i)] > 0 ? from[opjit_offset(x, i)] : 0;
        """,
    ),
    # Results
    Mistake(
        "last_element_forgotten",
        r"results .*got .*, expected .* at \[3, 5\] on ",
        body=BODY.replace("i < n", "i + 1 < n"),
    ),
    Mistake(
        "scratch_not_zeroed",
        "results .*got .*, expected",
        check=CONTIGUOUS,
        reference="x * 0 + x.sum()",
        body="""
        void *memory;
        OPJIT_TRY(opjit_scratch(&memory, sizeof(scalar_t), x));
        scalar_t *sum = memory;
        for (int64_t i = 0; i < n; i++)
            *sum += from[i];
        for (int64_t i = 0; i < n; i++)
            to[i] = *sum;
        """,
    ),
    Mistake(
        "strides_ignored",
        r"strides .*got .*, expected .* strides \(",
        body=BODY.replace("opjit_offset(x, i)", "i"),
    ),
    Mistake(
        "wrong_dtype_branch",
        r"dtypes .*on \(.*as (int32|float16)",
        kernel="""\
#include "opjit.h"

opjit_status wrong_dtype_branch_cpu(const opjit_tensor *x, opjit_tensor *out)
{
    OPJIT_TRY(opjit_empty(out, x->dim, x->sizes, x->dtype, x));
    for (int64_t i = 0; i < x->numel; i++) {
        if (opjit_dtype_size(x->dtype) == 8)
            ((double *)out->data)[i] = 2 * ((double *)x->data)[opjit_offset(x, i)];
        else if (opjit_dtype_size(x->dtype) == 4)
            ((float *)out->data)[i] = 2 * ((float *)x->data)[opjit_offset(x, i)];
        else
            OPJIT_FAIL("expected float32 or float64");
    }
    return OPJIT_OK;
}
""",
    ),
    Mistake(
        "input_written",
        "inputs kept .*writes into tensor 0",
        body="""
        for (int64_t i = 0; i < n; i++) {
            from[opjit_offset(x, i)] *= 2;
            to[i] = from[opjit_offset(x, i)];
        }
        """,
    ),
    Mistake(
        "tail_forgotten",
        r"got .*, expected .* on ",
        body=BODY.replace("i < n", "i < (n > 24 ? n / 4 * 4 : n)"),
    ),
    Mistake(
        "no_dimensions_forgotten",
        r"got .*, expected .* on \(float32 \(\)",
        body=BODY.replace("i < n", "i < (x->dim ? n : 0)"),
    ),
    Mistake(
        "fake_dtype",
        "fake kernel .*float64.*but the fake kernel.*float32",
        fake="x.new_empty(x.shape, dtype=torch.float32)",
    ),
    Mistake(
        "fake_strides",
        "fake kernel .*strides",
        fake="torch.empty_like(x)",
        more="""
samples_of = {name}._samples
{name}.samples(lambda device: [*samples_of(device), torch.ones(3, 4).t()])
""",
    ),
    Mistake(
        "two_line_error",
        "one-line error",
        check='OPJIT_CHECK(x->dim < 2 || x->sizes[0], "bad\\nshape");',
    ),
    # State
    Mistake(
        "static_temporary",
        "threads .*got .*, expected .*threads at once",
        before="static double doubled[1 << 16];",
        check="""
        OPJIT_CHECK(x->contiguous && n <= 1 << 16, "expected a contiguous tensor of at most 65536 elements");
        """,
        body="""
        for (int64_t i = 0; i < n; i++)
            doubled[i] = 2 * from[i];
        for (int64_t i = 0; i < n; i++)
            to[i] = doubled[i];
        """,
    ),
    Mistake(
        "state_between_calls",
        "got .*, expected .* on ",
        before="static int64_t calls = 0;",
        check="calls++;",
        body=BODY.replace("2 * from", "(scalar_t)(calls > 1 ? 3 : 2) * from"),
    ),
    # Gradients
    Mistake(
        "wrong_gradient",
        r"gradients .*of the gradient of tensor 0 on ",
        more=BACKWARD.replace("2 * grad", "grad"),
    ),
    Mistake(
        "tensor_on_ctx",
        "ctx.x is a tensor",
        more="""
@{name}.setup_context
def setup_context(ctx, inputs, output):
    ctx.x = inputs[0]

{name}.backward(lambda ctx, grad: 2 * grad + 0 * ctx.x)
""",
    ),
    Mistake(
        "second_gradient_lost",
        "second gradients",
        reference="2 * x * x",
        body=BODY.replace("2 * from", "2 * from[opjit_offset(x, i)] * from"),
        more="""
{name}.setup_context(lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]))
{name}.backward(lambda ctx, grad: 4 * grad * ctx.saved_tensors[0].detach())
""",
    ),
]
