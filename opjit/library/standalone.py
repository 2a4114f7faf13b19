"""A shared library of ops for plain torch: ``torch.ops.load_library("build/libmy_ops.so")`` in a process without opjit.

It contains the binaries of the cache as bytes, and a constructor that defines the ops; see
kernels_c/opjit_standalone.h. So a single file works on the CPU and on GPUs of several
architectures, and even in a process with a torch build without CUDA.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from opjit import files, resources
from opjit.backends.cpu import features
from opjit.backends.targets import Target
from opjit.builder import glue, parts, runtime_objects
from opjit.errors import BuildError
from opjit.operators.op import Op
from opjit.recipe import toolchain
from opjit.recipe.compilers import Compiler
from opjit.store.entry import Entry
from opjit.store.store import default_store

Binaries = dict[Op, list[tuple[Target, Entry]]]
_FLAGS = ("-shared", "-fPIC", "-x", "c", "-std=gnu11", "-O2", "-fexceptions", "-fvisibility=hidden")
_LINK = ("-L.", "-ltorch_cpu", "-ldl", "-Wl,-z,nodelete", "-Wl,--build-id=none", "-Wl,-s")


def write_standalone(place: Path, binaries: Binaries) -> None:
    """Write the library of some ops for one host CPU, unless the same one is there.

    Raises BuildError if the path has another file or a compiler fails.
    """
    first, _ = next(iter(binaries.values()))[0]
    compiler = toolchain.require_compiler(default_store().notes, first.host)
    with tempfile.TemporaryDirectory(prefix="opjit-") as folder:
        _publish(_compiled(binaries, compiler, Path(folder)), place)


def _compiled(binaries: Binaries, compiler: Compiler, work: Path) -> bytes:
    (work / "standalone.c").write_text(_rendered(binaries, work), "utf-8")
    runtime_objects.stub_of_torch("libtorch_cpu", compiler, work)
    include = f"-I{resources.include_path()}"
    parts.compile_part(
        compiler, [*_FLAGS, include, "standalone.c", "-o", "library.so", "-x", "none", *_LINK], work
    )
    return (work / "library.so").read_bytes()


def _publish(content: bytes, place: Path) -> None:
    """Let a file appear whole. Nothing is overwritten."""
    staged = place.parent / f".{files.random_name()}"
    try:
        files.write_synced(staged, content)
        staged.chmod(0o755)
        os.link(staged, place)
    except FileExistsError:
        if place.read_bytes() != content:
            raise BuildError(
                f"{place} is a different library, and opjit never overwrites a library; remove "
                "it, or choose another name",
                op=place.name,
                target="",
            ) from None
    finally:
        staged.unlink(missing_ok=True)


def _rendered(binaries: Binaries, work: Path) -> str:
    """Return the C source of a library, and write the binaries that it includes."""
    ops = [_op(number, op, found, work) for number, (op, found) in enumerate(binaries.items())]
    data, rows, entries = zip(*ops, strict=True)
    return resources.filled(
        "standalone.c.in",
        binaries="\n".join(data),
        entries="\n".join(entries),
        ops="".join(rows),
        count=len(ops),
    )


_ENTRY = """\
static void {name}_entry(torch_ivalue *stack, uint64_t num_args, uint64_t num_outputs)
{{
    opjit_call_kernel(&opjit_ops[{op}], &opjit_ops[{op}].kernels[{kernel}], stack, num_args, num_outputs);
}}
"""


def rank(target: Target) -> int:
    """Return a number that is larger for an architecture that uses more of a device."""
    known = list(target.backend.archs())
    if target.backend.name == "cpu":
        return -known.index(target.arch)
    return max((known.index(part) for part in target.arch.split("+") if part in known), default=-1)


def _op(
    number: int, op: Op, found: Sequence[tuple[Target, Entry]], work: Path
) -> tuple[str, str, str]:
    """Return the C source of an op: its data, its row in the table of ops, and the functions that torch calls."""
    by_key = dict[str, list[tuple[Target, Entry]]]()
    for target, entry in found:
        by_key.setdefault(target.backend.dispatch_key, []).append((target, entry))
    data = []
    entries = []
    rows = []
    for index, (key, these) in enumerate(by_key.items()):
        name = f"op{number}_{index}"
        best_first = sorted(these, key=lambda each: -rank(each[0]))
        table = ""
        for count, (target, entry) in enumerate(best_first):
            content, row = _binary(target, entry, f"{name}_{count}", work)
            data.append(content)
            table += row
        data.append(f"static opjit_binary {name}[] = {{\n{table}}};\n")
        entries.append(_ENTRY.format(name=name, op=number, kernel=index))
        rows.append(f'    {{"{key}", {name}_entry, {name}, {len(these)}, {{0}}, NULL}},\n')
    tags = glue.tags(op.schema)
    listed = ", ".join(tags) or "NULL"
    data.append(f"static int32_t (*const op{number}_tags[])(void) = {{{listed}}};\n")
    data += [f"static torch_boxed_kernel op{number}_{index}_entry;\n" for index in range(len(rows))]
    data.append(f"static opjit_kernel_set op{number}_kernels[] = {{\n{''.join(rows)}}};\n")
    row = (
        f'    {{"{op.schema.namespace}", "{op.schema.name}", "{op.qualified}", {glue.schema_literal(op.schema)},'
        f" op{number}_tags, {len(tags)}, {glue.tensor_bits(op.schema)}, op{number}_kernels, {len(rows)}, NULL, NULL}},\n"
    )
    return "".join(data), row, "".join(entries)


def _binary(target: Target, entry: Entry, name: str, work: Path) -> tuple[str, str]:
    """Write a binary to a file, and return the assembly that includes it, and its row in the table of binaries."""
    (work / f"{name}.bin").write_bytes(entry.library.read_bytes())
    data = (
        f'__asm__(".pushsection .rodata.{name}, \\"a\\"\\n.balign 64\\n{name}_start: .incbin \\"{name}.bin\\"\\n"\n'
        f'        "{name}_end: .byte 0\\n.popsection\\n");\n'
        f'extern const char {name}_start[] __attribute__((visibility("hidden")));\n'
        f'extern const char {name}_end[] __attribute__((visibility("hidden")));\n'
    )
    runtime = (
        f"libcudart.so.{target.runtime.removeprefix('cuda')}" if target.backend.uses_nvcc else ""
    )
    needs = " ".join(sorted(features(target.arch))) if target.backend.name == "cpu" else ""
    row = f'    {{{name}_start, {name}_end, "{target.arch}", "{runtime}", "{needs}", NULL}},\n'
    return data, row
