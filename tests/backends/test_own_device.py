"""A device that opjit does not know: its stream, its runtime library and its compiler, shown by the stub of tests/stub_device.py."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from opjit.builder import build
from opjit.errors import BuildError, CompileError, ToolMissing
from opjit.recipe import flags
from opjit.recipe.recipe import Recipe
from opjit.store import manifest
from opjit.store.store import Store
from tests import helpers, stub_device
from tests.helpers import ROOT, built, describe
from tests.stub_device import PLUS, Stub, write_compiler

# Calls keytest::plus on the stub device, in a process whose torch has the toy device.
CALL = """
import ctypes, sys
sys.path[:0] = [{root!r}, {example!r}]
import toy_device
installed = toy_device.install()
from tests.stub_device import Stub
sdk = Path({sdk!r})
opjit.register_backend(Stub(sdk{given}))
stub = ctypes.CDLL(str(sdk / "libstub.so"))
number = lambda name: ctypes.c_int32.in_dll(stub, name)
x = torch.ones(3, device="toy")
"""
COMPILES = 'if [ "$1" != --version ]; then'  # true of the compiler but when it is asked who it is


@pytest.fixture
def sdk(tmp_path: Path) -> Path:
    return stub_device.write_sdk(tmp_path / "sdk")


@pytest.fixture
def plus(tmp_path: Path) -> Path:
    return stub_device.write_plus(tmp_path / "plus")


def recipe(plus: Path, backend: Stub) -> Recipe:
    return describe(plus, backend.target)


def key(plus: Path, backend: Stub) -> str:
    found = recipe(plus, backend).key
    assert found is not None
    return found


def call(plus: Path, sdk: Path, code: str, given: str = "") -> str:
    """What code prints that calls ``torch.ops.keytest.plus(x)`` on the device."""
    start = CALL.format(
        root=str(ROOT), example=str(ROOT / "examples/09_own_device"), sdk=str(sdk), given=given
    )
    return helpers.fresh(
        helpers.declare(plus) + start + code, {"OPJIT_CACHE": str(plus.parent / "cache")}
    ).stdout


def test_a_kernel_gets_the_device_s_stream_and_memory_with_its_device_current(
    plus: Path, sdk: Path
) -> None:
    assert (
        call(
            plus,
            sdk,
            """
number("stub_device").value = 1  # another device is current
print(torch.ops.keytest.plus(x).tolist(), number("stub_device").value, number("stub_blocks").value)
print(ctypes.c_int64.from_address(ctypes.addressof(number("stub_streams")) + 8).value, "kernel on the stream of device 0")
""",
        )
        == "[2.0, 2.0, 2.0] 1 0\n1 kernel on the stream of device 0\n"
    )


def test_a_failure_of_the_device_s_function_is_an_error_with_its_code(
    plus: Path, sdk: Path
) -> None:
    assert call(
        plus,
        sdk,
        """
number("stub_failure").value = 7
try:
    torch.ops.keytest.plus(x)
except RuntimeError as error:
    print(error)
print(number("stub_device").value)
""",
    ).splitlines() == [
        "keytest::plus: the function `current` of device stub failed with code 7",
        "0",
    ]


@pytest.mark.parametrize(
    ("suffix", "text", "given"),
    [
        (".stub.c", PLUS, "compiled=False"),
        (".stub", helpers.PLUS.replace("plus_cpu", "plus_stub"), "stream=None"),
        (
            ".stub",
            PLUS.replace("stub_blocks == 1", "stub_blocks == 0"),
            "stream=__import__('tests.stub_device').stub_device.STREAM._replace(exchange=None, allocate=None, free=None)",
        ),
    ],
    ids=["in C with a stream", "compiled without streams", "torch's device guard and memory"],
)
def test_a_device_may_leave_parts_out(
    tmp_path: Path, sdk: Path, suffix: str, text: str, given: str
) -> None:
    plus = stub_device.write_plus(tmp_path / "plus", suffix, text)
    assert (
        call(plus, sdk, "print(torch.ops.keytest.plus(x).tolist())", f", {given}")
        == "[2.0, 2.0, 2.0]\n"
    )


def test_a_built_library_runs_on_the_device_without_a_compiler(plus: Path, sdk: Path) -> None:
    path = call(
        plus,
        sdk,
        f"print(opjit.build_library('keytest::plus', {str(plus / 'built')!r}, device='stub'))",
    )
    code = CALL.format(
        root=str(ROOT), example=str(ROOT / "examples/09_own_device"), sdk=str(sdk), given=""
    )
    done = helpers.fresh(
        f"""\
import torch, opjit
from dataclasses import replace
from pathlib import Path
{code}
opjit.load_library({path.strip()!r})
print(torch.ops.keytest.plus(x).tolist())
""",
        {"PATH": "", "OPJIT_CACHE": str(plus.parent / "empty")},
    )
    assert done.stdout == "[2.0, 2.0, 2.0]\n"


def test_what_decides_the_binary_is_in_the_key(plus: Path, sdk: Path, tmp_path: Path) -> None:
    """Each change gives another key; what changes nothing gives the same."""
    backend = Stub(sdk)

    changes: dict[str, Callable[[], object]] = {
        "version": lambda: write_compiler(sdk, "stubcc 1.1"),
        "program": lambda: write_compiler(sdk, "stubcc 1.1", before="# changed"),
        "flags": lambda: setattr(backend, "more", ("-DMORE",)),
        "header": lambda: (sdk / "stub.h").write_text(stub_device.HEADER + "/* changed */\n"),
        "stream": lambda: setattr(backend, "stream", stub_device.STREAM._replace(exchange=None)),
        "author's header": lambda: (plus / "amount.h").write_text("#define AMOUNT 2.0f\n"),
    }
    seen = [built(plus, tmp_path / "cache", backend.target).key]
    other = Stub(stub_device.write_sdk(sdk.parent / "elsewhere"))
    assert built(plus, tmp_path / "another", other.target).key == seen[0]
    for name, change in changes.items():
        change()
        seen.append(built(plus, tmp_path / "cache", backend.target).key)
        assert len(set(seen)) == len(seen), name


def test_an_entry_names_the_compiler_and_the_file_it_compiled(
    plus: Path, sdk: Path, tmp_path: Path
) -> None:
    entry = built(plus, tmp_path / "cache", Stub(sdk).target)
    document = manifest.parse((entry.folder / manifest.NAME).read_bytes()).document
    assert document["toolchain"]["device.version"] == "stubcc 1.0"
    assert "<include 0>/stub.h" in {**document["known"], **document["inputs"]}
    assert document["flags"]["link"] == ["<include 0>/libstub.so"]
    assert '#include "plus.stub"' in (entry.folder / "opjit_kernel.stub").read_text()
    assert str(tmp_path) not in json.dumps(document)


def test_builds_in_two_folders_give_the_same_bytes(plus: Path, sdk: Path, tmp_path: Path) -> None:
    backend = Stub(sdk)
    backend.more = ("-ffile-prefix-map={staging}/=", "-ffile-prefix-map={folder}/=")
    entries = [built(plus, tmp_path / name, backend.target) for name in ("one", "another")]
    assert entries[0].library.read_bytes() == entries[1].library.read_bytes()


def test_a_complaint_of_the_compiler_leads_with_the_author_s_line(
    plus: Path, sdk: Path, tmp_path: Path
) -> None:
    (plus / "plus.stub").write_text(PLUS.replace("    stream->kernels++;", "    stream->kernel++;"))
    with pytest.raises(CompileError) as caught:
        built(plus, tmp_path / "cache", Stub(sdk).target)
    line = PLUS.splitlines().index("    stream->kernels++;") + 1
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"{plus / 'plus.stub'}:{line}:13: error: ")
    assert "has no member named 'kernel'" in first
    assert caught.value.command is not None
    assert caught.value.command.split()[0] == str(sdk / "stubcc")


@pytest.mark.parametrize(
    ("stream", "found"), [("stub_stream_t stream", "int64_t *out"), ("", "opjit_tensor *out")]
)
def test_a_kernel_that_does_not_match_the_schema_is_told_what_was_expected(
    stream: str, found: str, plus: Path, sdk: Path, tmp_path: Path
) -> None:
    last = f", {stream}" if stream else ""
    (plus / "plus.stub").write_text(
        '#include "opjit.h"\n#include "stub.h"\n'
        f"opjit_status plus_stub(const opjit_tensor *x, {found}{last})\n{{\n    return OPJIT_OK;\n}}\n"
    )
    with pytest.raises(CompileError) as caught:
        built(plus, tmp_path / "cache", Stub(sdk).target)
    assert str(caught.value).splitlines()[0] == (
        f"{plus / 'plus.stub'}:3:14: error: plus_stub does not match the schema of keytest::plus: expected opjit_status "
        f"plus_stub(const opjit_tensor *x, opjit_tensor *out, stub_stream_t stream), found opjit_status "
        f"plus_stub(const opjit_tensor *x, {found}{last})"
    )


@pytest.mark.parametrize(
    ("before", "error", "message"),
    [
        (
            None,
            ToolMissing,
            "no {compiler}, which compiles kernels for stub: the program does not exist; install the Stub SDK",
        ),
        (
            "echo no license; exit 3",
            ToolMissing,
            "{compiler} is not a working compiler: `{compiler} --version` printed 'no license'; install the Stub SDK",
        ),
        (
            "exit 0",
            ToolMissing,
            "{compiler} is not a working compiler: `{compiler} --version` printed nothing; install the Stub SDK",
        ),
        (
            f"{COMPILES} exit 0; fi",
            BuildError,
            "reported success but left no object file, {{object}}, in the flags of the backend stub",
        ),
        (
            f"{COMPILES} kill -9 $$; fi",
            BuildError,
            "stubcc was killed by signal 9; try again, with more memory if it needs it",
        ),
    ],
    ids=["missing", "says no", "says nothing", "no object", "killed"],
)
def test_a_compiler_that_does_not_work_is_one_message_and_no_fault_of_the_source(
    before: str | None, error: type[Exception], message: str, plus: Path, sdk: Path, tmp_path: Path
) -> None:
    if before is None:
        (sdk / "stubcc").unlink()
    else:
        write_compiler(sdk, before=before)
    with pytest.raises(error, match=re.escape(message.format(compiler=sdk / "stubcc"))) as caught:
        built(plus, tmp_path / "cache", Stub(sdk).target)
    assert not isinstance(caught.value, CompileError)


def test_a_binary_serves_where_its_compiler_is_missing(
    plus: Path, sdk: Path, tmp_path: Path
) -> None:
    made = built(plus, tmp_path / "cache", Stub(sdk).target)
    (sdk / "stubcc").unlink()
    assert helpers.found(Store(tmp_path / "cache"), recipe(plus, Stub(sdk))) == made


def test_a_header_that_only_the_compiler_finds_is_an_input(
    plus: Path, sdk: Path, tmp_path: Path
) -> None:
    hidden = tmp_path / "hidden.h"
    hidden.write_text("")
    (plus / "plus.stub").write_text(f"#define TEXT(name) #name\n#include TEXT({hidden})\n{PLUS}")
    first = built(plus, tmp_path / "cache", Stub(sdk).target)
    assert built(plus, tmp_path / "cache", Stub(sdk).target).folder == first.folder
    hidden.write_text("/* edited */")
    assert built(plus, tmp_path / "cache", Stub(sdk).target).folder != first.folder


def test_an_author_s_folders_and_libraries_reach_the_device_s_compiler_and_flags_for_gcc_do_not(
    plus: Path, sdk: Path
) -> None:
    backend = Stub(sdk)
    plain = recipe(plus, backend).flags
    extra = flags.check_flags("keytest::plus", plus, ["-DTILE=2"], ["-DTILE=3"], ["-lz"], ["."])
    joined = flags.join(plain, extra, backend.target)
    assert joined.device == plain.device
    assert "-DTILE=2" not in joined.c
    assert joined.include == (str(sdk), str(plus))
    assert joined.link == ("-lz", *plain.link)


def test_an_author_s_other_sources_are_compiled_by_the_device_s_compiler(
    plus: Path, sdk: Path, tmp_path: Path
) -> None:
    (plus / "plus.stub").write_text(
        "extern float amount(void);\n" + PLUS.replace("AMOUNT", "amount()")
    )
    (plus / "amount.stub").write_text(
        '#include "amount.h"\nfloat amount(void)\n{\n    return AMOUNT;\n}\n'
    )
    plain = recipe(plus, Stub(sdk))
    flags = plain.flags._replace(sources=(str(plus / "amount.stub"),))
    more = replace(plain, sources=(*plain.sources, *flags.sources), flags=flags).now()
    entry = build.build(more, Store(tmp_path / "cache"))
    assert entry.library.is_file()
