"""A stub of a device that opjit does not know, with a stream type, a runtime library and a compiler of its own.

Its kernels compute with the host's CPU. Its memory is that of the toy device of examples/09_own_device, which torch has to know as well in
a process that calls a kernel."""

import shlex
import subprocess
from pathlib import Path

from opjit.backends import DeviceCompiler, Flags, Stream
from opjit.backends.cpu import GLUE, NEEDED, Cpu
from opjit.backends.targets import Target
from tests.helpers import program, real_compiler, write_op

HEADER = """\
#ifndef STUB_H
#define STUB_H
#include <stdint.h>
typedef struct stub_stream { int32_t device; int64_t kernels; } *stub_stream_t;
extern int32_t stub_device, stub_blocks, stub_failure; /* the current device, blocks of memory in use, what functions return */
extern struct stub_stream stub_streams[2];
#endif
"""
RUNTIME = """\
#include "stub.h"
#include <stdlib.h>
int32_t stub_device, stub_blocks, stub_failure;
struct stub_stream stub_streams[2] = {{.device = 0}, {.device = 1}};
int32_t stub_current(int32_t device, void **stream) { *stream = &stub_streams[device]; return stub_failure; }
int32_t stub_exchange(int32_t device, int32_t *before) { *before = stub_device; stub_device = device; return 0; }
int32_t stub_allocate(uint64_t bytes, void **memory) { stub_blocks++; *memory = malloc(bytes); return 0; }
int32_t stub_free(void *memory) { stub_blocks--; free(memory); return 0; }
"""
# Computes in scratch memory; a kernel that is launched on another device than its stream's is an error.
PLUS = """\
#include "opjit.h"
#include "stub.h"
#include "amount.h"
opjit_status plus_stub(const opjit_tensor *x, opjit_tensor *out, stub_stream_t stream)
{
    void *scratch;
    OPJIT_TRY(opjit_empty_like(out, x, x->dtype));
    OPJIT_TRY(opjit_scratch(&scratch, x->numel * (int64_t)sizeof(float), x));
    OPJIT_CHECK(stub_device == stream->device && stub_blocks == 1, "device %d, %d blocks", (int)stub_device, (int)stub_blocks);
    stream->kernels++;
    for (int64_t i = 0; i < x->numel; i++)
        ((float *)scratch)[i] = ((const float *)x->data)[i] + AMOUNT;
    memcpy(out->data, scratch, (size_t)x->numel * sizeof(float));
    return OPJIT_OK;
}
"""
STREAM = Stream(
    "stub_stream_t", "stub.h", "stub_current", "stub_exchange", "stub_allocate", "stub_free"
)


class Stub(Cpu):
    """The backend, with an SDK from `write_sdk`, whose compiler builds the kernels where they are `compiled`; else gcc does."""

    name = "stub"
    device_type = "toy"
    dispatch_key = "PrivateUse1"

    def __init__(self, sdk: Path, stream: Stream | None = STREAM, compiled: bool = True) -> None:
        self.sdk = sdk
        self.stream = stream
        self.compiler = (
            DeviceCompiler(str(sdk / "stubcc"), "install the Stub SDK") if compiled else None
        )
        self.suffix = ".stub" if compiled else ".stub.c"
        self.more: tuple[str, ...] = ()  # flags of the compiler

    @property
    def target(self) -> Target:
        return Target(self, "stub1")

    def host_arch(self) -> str:
        return "stub1"

    def archs(self) -> list[str]:
        return ["stub1"]

    def flags(self, arch: str, runtime: str) -> Flags:
        device = (
            *self.more,
            "-I{path}",
            "-c",
            "{source}",
            "-o",
            "{object}",
        )
        return Flags(
            ("-x", "c", "-std=gnu11", "-O2", *GLUE),
            (),
            (str(self.sdk / "libstub.so"),),
            ("libtorch_cpu",),
            NEEDED,
            include=(str(self.sdk),),
            device=device if self.compiler else (),
        )


def write_sdk(folder: Path) -> Path:
    """Write stub.h, libstub.so and the compiler, stubcc, whose flag for a list of files is not gcc's."""
    folder.mkdir(parents=True)
    (folder / "stub.h").write_text(HEADER)
    (folder / "stub.c").write_text(RUNTIME)
    write_compiler(folder)
    subprocess.run(
        [
            real_compiler(),
            "-shared",
            "-fPIC",
            "-Wl,-soname,libstub.so",
            "-o",
            "libstub.so",
            "stub.c",
        ],
        cwd=folder,
        check=True,
    )
    return folder


def write_compiler(sdk: Path, version: str = "stubcc 1.0", before: str = "") -> None:
    """Write the compiler: a shell script around gcc, which takes a file of any suffix for C, and runs the line `before` first."""
    program(
        sdk / "stubcc",
        f"""#!/bin/sh
{before}
[ "$1" = --version ] && {{ echo {shlex.quote(version)}; exit; }}
exec {shlex.quote(real_compiler())} -fPIC -O2 -Werror=incompatible-pointer-types -x c "$@"
""",
    )


def write_plus(folder: Path, suffix: str = ".stub", text: str = PLUS) -> Path:
    """Write keytest::plus with a kernel for the stub device."""
    write_op(folder)
    (folder / f"plus{suffix}").write_text(text)
    return folder
