"""What goes wrong on the way to an op, and that each error says what a person can do about it."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import opjit
from opjit import backends, build, diagnosis, errors, targets, toolchain
from opjit.errors import (
    BuildError,
    CompileError,
    DeviceUnavailable,
    NoKernel,
    OpjitError,
    ToolMissing,
    UnknownArch,
    UnknownDevice,
    UnknownOp,
)
from opjit.store import Store
from tests import helpers
from tests.helpers import PLUS, PLUS_CUDA, built, cuda_target, fake_compiler, program, write_op

MakeOp = Callable[..., opjit.Op]


# --- the classes ---------------------------------------------------------------------------------------------------------------------

EXAMPLES: list[OpjitError] = [
    UnknownOp("opjit::x", ["y", "z"]),
    errors.SchemaError("a"),
    errors.DeclarationError("b"),
    UnknownDevice("c"),
    UnknownArch("d"),
    DeviceUnavailable("e"),
    NoKernel("f"),
    ToolMissing("nvcc", "g"),
    BuildError("h", op="o", target="t", command="gcc x", log=Path("/log")),
    CompileError("i", op="o", target="t"),
    errors.LoadError("j"),
    errors.RemoteError("k"),
    errors.EntryError("l"),
    errors.UntrustedFolder("m"),
    errors.BadSetting("n"),
    errors.UnknownEntry("o", "ab", ["abc", "abd"]),
    errors.RecordError("p"),
    errors.PrecompileError("q", []),
    OpjitError("s"),
]


def test_every_error_class_has_an_example_here() -> None:
    classes = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, OpjitError)}
    assert {type(error) for error in EXAMPLES} == classes


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_every_error_is_an_opjit_error_and_survives_pickling_with_its_facts(error: OpjitError) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.__dict__ == error.__dict__
    assert isinstance(error, RuntimeError)


def test_an_error_crosses_from_a_worker_process() -> None:
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(1) as pool, pytest.raises(UnknownOp, match="did you mean allreduce") as caught:
        pool.apply(opjit.get, ("allredduce",))
    assert caught.value.closest == ["allreduce"]


# --- names ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["allredduce", "opjit::all_reduce", "Allreduce"])
def test_an_unknown_op_is_answered_with_the_closest_names(name: str) -> None:
    with pytest.raises(UnknownOp, match=r"no op named 'opjit::.*'.*did you mean allreduce\?") as caught:
        opjit.get(name, "cpu")
    assert caught.value.closest == ["allreduce"]
    assert isinstance(caught.value, KeyError)


def test_an_unknown_op_like_no_other_is_answered_with_the_command_that_lists_them() -> None:
    with pytest.raises(UnknownOp, match="opjit list"):
        opjit.get("zzzzzzzz")


@pytest.mark.parametrize("device", ["gpu9", "3.7", "", "cuda:x", "cpu:many", "cpu:0:1", 3.7, True, ["cpu"], {}, "CPU", "cpu ", "cuda:-1"])
def test_an_unknown_device_is_refused_and_named(device: object) -> None:
    with pytest.raises(UnknownDevice, match=re.escape(repr(device))) as caught:
        opjit.get("allreduce", device)
    assert "cpu" in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("device", ["meta", torch.device("meta"), "xpu", "mps:0"])
def test_a_device_without_a_backend_is_refused_with_the_ones_there_are(device: object) -> None:
    with pytest.raises(UnknownDevice, match=r"no backend for device '\w+'; there are: cpu, cuda"):
        opjit.get("allreduce", device)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_every_spelling_of_a_device_gives_the_same_op(device: object) -> None:
    assert opjit.get("allreduce", device) is torch.ops.opjit.allreduce.default


@pytest.mark.parametrize("arch", ["sm_9", "sm90", "x86-64-v9", "", "native", "sm_90+", "sm_90+x86-64-v3", "../evil", "sm_90\n"])
def test_an_unknown_arch_is_refused_with_the_ones_there_are(arch: str) -> None:
    with pytest.raises(UnknownArch, match=r"unknown arch .*; known: .*x86-64-v3.*sm_90") as caught:
        targets.named(arch)
    assert isinstance(caught.value, ValueError)


def test_an_unknown_arch_in_the_environment_is_refused_and_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPJIT_ARCH", "x86-64-v99")
    with pytest.raises(UnknownArch, match="x86-64-v99"):
        targets.here(helpers.cpu())
    monkeypatch.setenv("OPJIT_ARCH", "sm_90")  # another backend's
    assert targets.here(helpers.cpu()).arch != "sm_90"


def test_a_cuda_op_without_a_gpu_says_how_to_build_it_all_the_same() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceUnavailable, match="opjit get OP --arch sm_90"):
        opjit.get("allreduce", "cuda")


def test_an_op_without_a_source_for_the_backend_names_the_file_it_looked_for(make_op: MakeOp) -> None:
    op = make_op("lonely(Tensor x) -> Tensor")
    with pytest.raises(NoKernel, match=r"has no kernel for cpu: expected lonely\.c .* in /"):
        opjit.get(op.qualified, "cpu")


def test_a_tensor_of_a_kind_without_a_backend_is_refused_in_one_sentence() -> None:
    kinds = {"sparse": torch.ones(3).to_sparse()}
    if torch.backends.mkldnn.is_available():
        kinds["mkldnn"] = torch.ones(3).to_mkldnn()
    for x in kinds.values():
        with pytest.raises(NotImplementedError, match="has no kernel for tensors of the kind") as caught:
            torch.ops.opjit.allreduce(x)
        assert "\n" not in str(caught.value).strip()
    assert torch.ops.opjit.allreduce(torch.ones(3, device="meta")).device.type == "meta"


@pytest.mark.parametrize(("dtype", "name"), [(torch.complex64, "complex64"), (torch.float8_e4m3fn, "an unsupported dtype")])
def test_a_wrong_dtype_is_answered_with_its_name(dtype: torch.dtype, name: str) -> None:
    with pytest.raises(RuntimeError, match=f"allreduce.*not {name}"):
        opjit.get("allreduce", "cpu")(torch.zeros(3).to(dtype))


def test_offline_mode_names_what_is_in_no_cache(make_op: MakeOp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPJIT_OFFLINE", "1")
    op = make_op("noop(Tensor x) -> ()", "opjit_status noop_cpu(const opjit_tensor *x) { (void)x; return OPJIT_OK; }")
    with pytest.raises(OpjitError, match=f"{op.qualified}.* is in no cache.*OPJIT_OFFLINE"):
        opjit.get(op.qualified, "cpu")


# --- tools that are missing or strange -----------------------------------------------------------------------------------------------


def test_a_missing_compiler_says_what_to_install(op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ToolMissing, match=r"(?s)no C compiler.*apt install gcc.*OPJIT_CACHE") as caught:
        built(op, tmp_path / "cache")
    assert caught.value.tool == "cc"
    assert not (tmp_path / "cache").exists()


def test_a_missing_compiler_in_a_fresh_process_with_an_empty_cache(tmp_path: Path) -> None:
    code = "import opjit\ntry: opjit.get('allreduce', 'cpu')\nexcept opjit.errors.ToolMissing as error: print(error.tool, error)"
    done = helpers.fresh(code, {**helpers.no_compiler(tmp_path), "OPJIT_CACHE": str(tmp_path / "cache")})
    assert done.stdout.startswith("cc no C compiler")


@pytest.mark.parametrize("name", ["no-such", "/no/such/cc", "gcc -m32", "/"])
def test_a_cc_that_names_no_program_is_an_error_and_not_passed_over(
    op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("CC", name)
    with pytest.raises(ToolMissing, match=re.escape(f"CC is {name!r}")) as caught:
        built(op, tmp_path / "cache")
    assert caught.value.tool == "cc"


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch's builder does not quote the compiler's path")
def test_a_cc_that_is_a_relative_path_works(op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(tmp_path / "my cc")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CC", "./my cc")
    built(op, tmp_path / "cache")


GARBAGE = {
    "silent": "#!/bin/sh\n",
    "words": "#!/bin/sh\necho hello\n",
    "bytes": "#!/bin/sh\nprintf '\\377\\376\\0Target: '\n",
    "fails": "#!/bin/sh\necho broken >&2; exit 1\n",
    "no-format": "\x00\x01\x02",
    "no-interpreter": "#!/no/such/interpreter\n",
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_compiler_that_does_not_say_who_it_is_is_refused(op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    fake = program(tmp_path / "strange-cc", GARBAGE[kind])
    monkeypatch.setenv("CC", str(fake))
    with pytest.raises(ToolMissing, match=re.escape(f"{fake} is not a gcc or clang that works")) as caught:
        built(op, tmp_path / "cache")
    assert caught.value.tool == "cc"


@pytest.mark.parametrize("kind", GARBAGE)
def test_an_nvcc_that_does_not_say_who_it_is_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    program(tmp_path / "bin" / "nvcc", GARBAGE[kind])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(ToolMissing, match="is not an nvcc that works") as caught:
        toolchain.require_nvcc(None)
    assert caught.value.tool == "nvcc"


def test_a_missing_ninja_says_what_to_install(op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", helpers.real_compiler())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ninja", None)
    with pytest.raises(ToolMissing, match="pip install ninja") as caught:
        built(op, tmp_path / "cache")
    assert caught.value.tool == "ninja"


def test_a_ninja_that_does_not_work_is_quoted(op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin" / "ninja", "#!/bin/sh\necho no such luck >&2; exit 3\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(CompileError, match="no such luck"):
        built(op, tmp_path / "cache")


def test_ninja_is_found_beside_python_where_path_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ninja")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Path(toolchain.require_ninja(), "ninja").exists()


def test_a_missing_nvcc_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: Path) -> None:
    monkeypatch.setattr(toolchain, "find_nvcc", lambda memory: None)
    recipe = helpers.describe(op, targets.named("sm_90", cuda_version="13.0"), compiler={})
    with pytest.raises(ToolMissing, match="CUDA Toolkit") as caught:
        build.build(recipe, Store(tmp_path / "cache"))
    assert caught.value.tool == "nvcc"


# --- sources that do not compile -------------------------------------------------------------------------------------------------


def refusal(op: Path, cache: Path) -> BuildError:
    with pytest.raises(BuildError) as caught:
        built(op, cache)
    assert helpers.entries(cache) == []
    assert list((cache / "v1" / "staging").iterdir()) == []
    assert caught.value.op == "keytest::plus"
    assert caught.value.target == str(targets.here(helpers.cpu()))
    return caught.value


def test_a_compile_error_leads_with_the_compiler_s_first_complaint_and_where_it_is(op: Path, tmp_path: Path) -> None:
    (op / "plus.c").write_text(
        PLUS.replace("    return OPJIT_OK;", "    int y = undeclared_name;\n    another mistake;\n    return OPJIT_OK;")
    )
    error = refusal(op, tmp_path / "cache")
    assert isinstance(error, CompileError)
    first = str(error).splitlines()[0]
    assert re.fullmatch(re.escape(str(op / "plus.c")) + r":11:13: error: .*undeclared_name.* undeclared .*", first)
    assert "keytest::plus" in str(error)
    assert "-std=c++" not in str(error)
    assert error.command is not None
    assert error.command.startswith(toolchain.require_compiler(None).path)
    assert " -c " in error.command


def test_a_compile_error_s_log_holds_the_complete_output(op: Path, tmp_path: Path) -> None:
    (op / "plus.c").write_text(PLUS + "".join(f"int f{n}(void) {{ return missing_{n}; }}\n" for n in range(40)))
    error = refusal(op, tmp_path / "cache")
    assert error.log is not None
    assert str(error.log) in str(error)
    text = error.log.read_text()
    assert all(f"missing_{n}" in text for n in range(40))
    assert error.command is not None
    assert error.command in text
    assert len(str(error).splitlines()) < 30


def test_an_error_in_a_header_is_shown_where_it_is(op: Path, tmp_path: Path) -> None:
    (op / "amount.h").write_text("\n\nint 5x;\n")
    assert str(refusal(op, tmp_path / "cache")).startswith(f"{op / 'amount.h'}:3:5: error: ")


def test_a_missing_header_is_shown_where_it_is_asked_for(op: Path, tmp_path: Path) -> None:
    (op / "amount.h").unlink()
    assert re.match(re.escape(f"{op / 'plus.c'}:2:10: fatal error: amount.h: No such file"), str(refusal(op, tmp_path / "cache")))


@pytest.mark.parametrize(("top", "hint"), [
    ("#include <torch/extension.h>\n", "torch's headers are not for ops, and C++ code goes to opjit.load"),
    ("#include <c10/core/Device.h>\n", "torch's headers are not for ops, and C++ code goes to opjit.load"),
    ("#include <vector>\n", "a header without .h is one of C++, and C++ code goes to opjit.load"),
    ('extern "C"\n', "leave out extern \"C\", which opjit's glue does not need"),
])
def test_habits_of_c_plus_plus_are_answered_with_what_an_op_s_kernel_is(op: Path, tmp_path: Path, top: str, hint: str) -> None:
    (op / "plus.c").write_text(PLUS.replace("opjit_status plus_cpu", f"{top}opjit_status plus_cpu"))
    first = str(refusal(op, tmp_path / "cache")).splitlines()[0]
    assert f"; an op's kernel is plain C over opjit.h: {hint}" in first
    assert "extra_include_paths" not in first


def test_a_missing_header_that_is_no_habit_of_c_plus_plus_goes_into_extra_include_paths(op: Path, tmp_path: Path) -> None:
    (op / "plus.c").write_text('#include "nowhere.h"\n' + PLUS)
    assert str(refusal(op, tmp_path / "cache")).splitlines()[0].endswith("; the folder of a header goes into extra_include_paths")
    output = "/home/me/torch/own.cu:1:10: fatal error: Eigen/Dense: No such file or directory\n"
    for source in (None, ("own.cu", "opjit_status plus_cuda()")):
        error = diagnosis.diagnose(output, "ns::plus", "cuda", tmp_path / "logs", source)
        assert str(error).splitlines()[0].endswith("; the folder of a header goes into extra_include_paths")


def test_a_use_of_opjit_printf_without_its_header_names_it(op: Path, tmp_path: Path) -> None:
    (op / "plus.c").write_text(PLUS.replace("return OPJIT_OK;", 'opjit_printf("plus"); return OPJIT_OK;'))
    assert str(refusal(op, tmp_path / "cache")).splitlines()[0].endswith('; an op\'s kernel is plain C over opjit.h: '
                                                                         '#include "opjit_printf.h" for it')


def test_a_device_function_that_is_never_defined_is_the_first_line(tmp_path: Path) -> None:
    output = "[1/2] nvcc\nptxas fatal   : Unresolved extern function '_Z1gf'\n"
    told = str(diagnosis.diagnose(output, "ns::plus", "cuda", tmp_path / "logs", ("plus.cu", "opjit_status plus_cuda()")))
    assert told.startswith("ptxas fatal   : Unresolved extern function '_Z1gf'; an op is compiled from one source: define it there")


def test_an_instruction_of_one_arch_alone_names_the_target_that_has_it(tmp_path: Path) -> None:
    output = "[1/2] nvcc\nptxas /tmp/k.ptx, line 21; error   : Instruction 'wgmma.fence' not supported on .target 'sm_90'\n"
    told = str(diagnosis.diagnose(output, "ns::plus", "cuda", tmp_path / "logs", ("plus.cu", "opjit_status plus_cuda()")))
    assert told.splitlines()[0].endswith("; what an arch has alone is in the target with an a behind it, such as sm_90a")


UNCHECKED = ("OPJIT_TRY(opjit_empty_like(out, x, x->dtype));", "opjit_empty_like(out, x, x->dtype);")


def test_a_status_that_nobody_looks_at_does_not_compile(op: Path, tmp_path: Path) -> None:
    (op / "plus.c").write_text(PLUS.replace(*UNCHECKED))
    assert "ignoring return value of 'opjit_empty_like'" in str(refusal(op, tmp_path / "cache")).splitlines()[0]


@pytest.mark.nvcc
@pytest.mark.parametrize(("line", "changed", "told"), [
    (*UNCHECKED, "ignoring return value of .*opjit_empty_like"),
    ("return OPJIT_LAUNCHED();", "OPJIT_LAUNCHED(); return OPJIT_OK;", "ignoring return value of .*opjit_cuda_status"),
    ("return OPJIT_LAUNCHED();", "", "control reaches end of non-void function"),
])
def test_a_status_that_is_not_looked_at_or_not_returned_does_not_compile_in_cuda_either(tmp_path: Path, line: str, changed: str,
                                                                                        told: str) -> None:
    op = write_op(tmp_path / "op", plus_cu=PLUS_CUDA.replace(line, changed))
    with pytest.raises(CompileError) as caught:
        built(op, tmp_path / "cache", cuda_target("sm_90"))
    assert re.search(told, str(caught.value).splitlines()[0])


@pytest.mark.nvcc
def test_half_and_bfloat16_have_cudas_own_arithmetic(tmp_path: Path) -> None:
    code = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
template <typename T> __global__ void half_kernel(T *x) { x[0] = static_cast<T>(static_cast<float>(x[1]) + 1.0f); }
template __global__ void half_kernel(__half *);
template __global__ void half_kernel(__nv_bfloat16 *);
__global__ void product(__half *x, __half2 *y) { x[0] = x[1] * x[2]; y[0] = y[1] + y[2]; }
"""
    built(write_op(tmp_path / "op", plus_cu=PLUS_CUDA + code), tmp_path / "cache", cuda_target("sm_90"))


def test_an_error_directive_is_the_first_line(op: Path, tmp_path: Path) -> None:
    (op / "amount.h").write_text('#error "define AMOUNT"\n')
    assert str(refusal(op, tmp_path / "cache")).startswith(f"{op / 'amount.h'}:1:2: error: ")


def test_a_function_that_is_never_defined_is_found_when_the_op_is_built(op: Path, tmp_path: Path) -> None:
    (op / "plus.c").write_text(
        PLUS.replace("\n\n", "\n\nfloat helper_without_body(float x);\n", 1).replace("+ AMOUNT", "+ helper_without_body(AMOUNT)")
    )
    error = refusal(op, tmp_path / "cache")
    assert isinstance(error, CompileError)
    assert "undefined reference to `helper_without_body'; an op is compiled from one source: define it there" in str(error).splitlines()[0]
    assert error.command is not None
    assert "-shared" in error.command


def test_a_function_that_is_not_declared_is_found_when_the_op_is_built(op: Path, tmp_path: Path) -> None:
    (op / "plus.c").write_text(PLUS.replace("+ AMOUNT", "+ (float)made_up(1)"))
    assert "made_up" in str(refusal(op, tmp_path / "cache")).splitlines()[0]


def test_a_kernel_with_another_signature_shows_both(op: Path, tmp_path: Path) -> None:
    (op / "plus.c").write_text(
        PLUS.replace("(const opjit_tensor *x, opjit_tensor *out)", "(const opjit_tensor *x, double a, opjit_tensor *out)")
    )
    text = str(refusal(op, tmp_path / "cache"))
    assert "conflicting types for 'plus_cpu'" in text.splitlines()[0].replace("\u2018", "'").replace("\u2019", "'")
    assert "previous declaration" in text


def test_an_empty_source_is_refused(op: Path, tmp_path: Path) -> None:
    (op / "plus.c").write_text("")
    assert "plus_cpu" in str(refusal(op, tmp_path / "cache")).splitlines()[0]


@pytest.mark.parametrize("header", ["Python.h", "torch/headeronly/version.h", "torch/csrc/inductor/aoti_torch/c/shim.h"])
def test_python_s_and_torch_s_headers_are_refused(op: Path, tmp_path: Path, header: str) -> None:
    (op / "plus.c").write_text(f"#include <{header}>\n" + PLUS)
    error = refusal(op, tmp_path / "cache")
    text = str(error)
    if "No such file" in text:
        pytest.skip(f"{header} is not installed")
    assert header in text or isinstance(error, CompileError)


def test_a_header_of_torch_that_is_c_is_refused_by_the_list_of_what_was_read(op: Path, tmp_path: Path) -> None:
    folder = Path(torch.__file__).parent / "include"
    plain = next(
        (
            path
            for path in sorted(folder.rglob("*.h"))
            if b"#include" not in (text := path.read_bytes())
            and b"::" not in text
            and b"class" not in text
            and b"template" not in text
            and b"constexpr" not in text
            and b"namespace" not in text
        ),
        None,
    )
    if plain is None:
        pytest.skip("every header of this torch is C++")
    (op / "plus.c").write_text(f"#include <{plain.relative_to(folder)}>\n" + PLUS)
    error = refusal(op, tmp_path / "cache")
    assert isinstance(error, CompileError) or "torch's and Python's headers" in str(error)


def test_a_source_that_breaks_off_no_matter_where_is_an_error_of_opjit(op: Path, tmp_path: Path) -> None:
    for cut in (3, 60, 150, 300):
        (op / "plus.c").write_text(PLUS[:-cut])
        refusal(op, tmp_path / "cache")


def test_a_source_that_is_not_text_is_an_error_of_opjit(op: Path, tmp_path: Path) -> None:
    (op / "plus.c").write_bytes(bytes(range(256)) * 4)
    assert isinstance(refusal(op, tmp_path / "cache"), CompileError)


# --- compilers that lie ----------------------------------------------------------------------------------------------------------

WHICH_OUTPUT = 'out=; previous=; for word in "$@"; do if [ "$previous" = -o ]; then out=$word; fi; previous=$word; done'
LIES = {
    "nothing": 'rm -f "$out"',
    "an-empty-file": ': > "$out"',
    "text": 'echo hello > "$out"',
    "half-an-elf": 'head -c 100 "$out" > "$out.x"; mv "$out.x" "$out"',
    "an-elf-without-sections": "printf '\\177ELF\\002\\001\\001' > \"$out\"",
    "an-executable": f'cp "{sys.executable}" "$out"',
}


@pytest.mark.parametrize("what", LIES)
def test_a_compiler_that_reports_success_and_leaves_no_library_is_named(
    op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    fake = fake_compiler(tmp_path / "lying-cc", after=f"if {helpers.LINKS}; then {WHICH_OUTPUT}; {LIES[what]}; code=0; fi")
    monkeypatch.setenv("CC", str(fake))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is not the cache's fault
        error = refusal(op, tmp_path / "cache")
    assert str(fake) in str(error)
    assert error.command is not None
    assert str(fake) in error.command
    monkeypatch.delenv("CC")
    assert helpers.caught(op, tmp_path / "cache").warnings == []  # and it has spoilt nothing for the next one


@pytest.mark.parametrize("extra", ["-lz", "-Wl,--no-as-needed -lpthread -ldl", "-Wl,-rpath,/evil"])
def test_a_library_that_asks_for_more_than_it_may_is_not_published(
    op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    subprocess.run(
        [
            helpers.real_compiler(),
            "-shared",
            "-nostdlib",
            "-Wl,-soname,libextra.so.1",
            "-o",
            str(own / "libextra.so"),
            "-x",
            "c",
            "/dev/null",
        ],
        check=True,
    )
    more = extra if "rpath" in extra else f"-Wl,--no-as-needed -L{own} -lextra"
    fake = program(
        tmp_path / "cc",
        f"#!/bin/sh\nif {helpers.LINKS}; then exec '{helpers.real_compiler()}' \"$@\" {more}; fi\n"
        f"exec '{helpers.real_compiler()}' \"$@\"\n",
    )
    monkeypatch.setenv("CC", str(fake))
    assert re.search(r"libextra\.so\.1|run path", str(refusal(op, tmp_path / "cache")))


def test_a_compiler_for_another_kind_of_machine_is_refused_in_a_sentence(op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = f"#!/bin/sh\n'{helpers.real_compiler()}' \"$@\" 2>&1 | sed 's/^Target: .*/Target: riscv64-linux-gnu/'\n"
    monkeypatch.setenv("CC", str(program(tmp_path / "cc", other)))
    with pytest.raises(ToolMissing, match="makes code for riscv64-linux-gnu, and opjit builds for x86_64 and aarch64; set CC to another"):
        built(op, tmp_path / "cache")


def test_a_compiler_that_is_killed_is_an_error_of_opjit(op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path / "cc", before=f"if {helpers.COMPILES}; then kill -9 $$; fi")))
    assert isinstance(refusal(op, tmp_path / "cache"), CompileError)


# --- the diagnosis ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["", "\n", "FAILED: x\n", "FAILED: x", "x" * 100_000, "\x00\udcff", "error:", "FAILED: a\nFAILED: b\n"])
def test_any_output_of_a_failed_build_becomes_an_error_with_a_first_line(tmp_path: Path, output: str) -> None:
    error = diagnosis.diagnose(output, "ns::op", "cpu x", tmp_path / "logs")
    assert str(error).strip()
    assert "ns::op" in str(error)


def test_a_log_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = diagnosis.diagnose("x.c:1:1: error: bad\n", "ns::op", "cpu x", tmp_path / "file" / "logs")
    assert error.log is None
    assert "full output" not in str(error)
    assert str(error).startswith("x.c:1:1: error: bad\n")


def test_the_notes_of_missing_backends_are_whole_sentences() -> None:
    for backend in backends.all_backends():
        missing = backend.available()
        assert missing is None or " " in missing


# --- at the command line ---------------------------------------------------------------------------------------------------------


def test_a_binary_that_goes_when_the_command_ends_is_built_once_and_is_a_failure(op: Path, tmp_path: Path, log: Path) -> None:
    for words in (("--device", "cpu"), ("--arch", "x86-64-v2")):
        log.write_text("")
        done = helpers.command("get", op, *words, OPJIT_CACHE="/proc/x")
        assert (done.returncode, done.stdout, len(log.read_text().splitlines())) == (1, "", 1)
        assert done.stderr.splitlines()[-1].startswith("Error: keytest::plus for cpu x86-64-v")
        assert "no cache can keep it" in done.stderr.splitlines()[-1]
    done = helpers.command("get", op, "--device", "cpu", "--build-directory", tmp_path / "built", OPJIT_CACHE="/proc/x")
    assert (done.returncode, Path(done.stdout.strip()).is_file()) == (0, True)


def test_a_warning_of_opjit_is_shown_as_its_text_at_the_command_line_and_others_as_python_shows_them(op: Path, tmp_path: Path) -> None:
    (op / "op.py").write_text("import warnings\nwarnings.warn('its own')\n" + helpers.OP_PY)

    def get(filters: str) -> subprocess.CompletedProcess[str]:
        cache = str(tmp_path / f"cache-{filters}")
        return helpers.command("get", op, "--device", "cpu", OPJIT_REMOTE="nowhere", OPJIT_CACHE=cache, PYTHONWARNINGS=filters)

    done = get("default")
    ours, others = done.stderr.splitlines()[-1], done.stderr.splitlines()[:-1]
    assert ours.startswith("Warning: the remote nowhere is not used by this process: expected a URL such as https://")
    assert others == [f"{op / 'op.py'}:2: UserWarning: its own", "  warnings.warn('its own')"]
    assert get("ignore").stderr == ""
    done = get("error:the remote")
    assert (done.returncode, "CacheWarning: the remote nowhere" in done.stderr) == (1, True)


@pytest.mark.parametrize(("text", "expected"), [
    ("import helper\n", ["raised ModuleNotFoundError: No module named 'nowhere'", 'op.py", line 1', "    import helper",
                         'helper.py", line 2', "    import nowhere"]),
    ("def (\n", ["raised SyntaxError: ", 'op.py", line 1', "    def (", "^"]),
])
def test_an_op_py_that_raises_is_told_of_without_opjit_s_lines(op: Path, tmp_path: Path, text: str, expected: list[str]) -> None:
    (tmp_path / "helper.py").write_text("\nimport nowhere\n")
    (op / "op.py").write_text(text)
    path = os.pathsep.join([str(helpers.ROOT), str(tmp_path)])
    for words in (("get", op), ("test", op), ("bench", op), ("list",)):
        done = helpers.command(*words, PYTHONPATH=path, OPJIT_PATH=str(op))
        assert (done.returncode, done.stdout) == (1, "")
        shown = done.stderr[done.stderr.index("Error: "):].splitlines()  # a CUDA build of torch may remark on the GPU before
        assert shown[0].startswith(f"Error: {op / 'op.py'} ")
        assert all(part in line for part, line in zip(expected, shown, strict=True)), done.stderr
