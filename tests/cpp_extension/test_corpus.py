"""The programs of corpus/ behave the same whichever way opjit builds them: as with torch's own headers."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch

import opjit
from opjit.cpp_extension import build, identity
from opjit.cpp_extension.identity import Extension
from opjit.store.entry import Entry
from opjit.store.manifest import NAME
from opjit.store.store import Store, default_root
from tests.conftest import run_folder
from tests.cpp_extension.corpus import reference
from tests.cpp_extension.corpus.calls import CHOSEN, CPU, CUDA, cuda
from tests.cpp_extension.corpus.outcomes import Outcome, results
from tests.cpp_extension.corpus.program import CFLAGS, CORPUS, Program
from tests.helpers import ROOT, environment, no_nvcc, shares_libstdcxx

ALL = [*CPU, *cuda.PROGRAMS]
BY_NAME = {program.name: program for program in ALL}
# Every fifth program, or all of those that OPJIT_TEST_CORPUS chooses: each is compiled on its own, as a user's is.
NAMES = [program.name for program in CPU][:: 1 if CHOSEN else 5]
Expected = dict[str, list[Outcome]]
# Programs that may need torch/extension.h, as the reference has it.
SLOW = {
    "nn/module_linear",
    "nn/sequential",
    "reductions/any_all",
    "reductions/dims",
    "signatures/const_ref",
    "signatures/items",
    "signatures/lists",
    "signatures/python_objects",
    "signatures/returns",
    "signatures/scalars",
    "signatures/std_function",
    "views/indexing",
    "views/metadata",
    "views/split_cat",
}


def fast_module(program: Program) -> Any:
    """The program as a user gets it from opjit."""
    arguments: dict[str, Any] = {
        "extra_cflags": CFLAGS,
        "is_python_module": program.library is None,
    }
    if program.file:
        sources = [CORPUS / f"{program.name}.cpp", CORPUS / f"{program.name}.cu"]
        module = opjit.load(
            program.identifier, [str(path) for path in sources if path.exists()], **arguments
        )
    else:
        module = opjit.load_inline(
            program.identifier,
            program.source,
            program.cuda_source,
            functions=program.functions,
            with_pytorch_error_handling=not program.plain,
            **arguments,
        )
    return getattr(torch.ops, program.library) if program.library else module


@pytest.fixture(scope="session")
def folder(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reference is built: kept between runs, as ninja knows what has changed."""
    if pytestconfig.pluginmanager.has_plugin("cacheprovider"):
        return Path(pytestconfig.cache.mkdir("corpus"))
    return run_folder(tmp_path_factory) / "corpus"


@pytest.fixture(scope="session")
def reference_run(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Expected]:
    """Calls the programs that torch's headers made, in a process of its own: TORCH_LIBRARY registers a name once in a process.

    The workers of a run share the results of the first call; `again` calls the programs once more."""

    def run(device: str = "cpu", again: bool = False) -> Expected:
        if not shares_libstdcxx(os.environ.get("CXX", "c++")):
            pytest.skip(
                "no C++ compiler here links libstdc++ as a shared library, and torch's own extensions crash with another"
            )
        place = folder / device
        place.mkdir(parents=True, exist_ok=True)
        kept = run_folder(tmp_path_factory) / f"corpus-{device}.json"
        with filelock.FileLock(place / "running"):  # other workers need it too
            if kept.exists() and not again:
                shared: Expected = json.loads(kept.read_text(encoding="utf-8"))
                return shared
            words = [sys.executable, "-m", reference.__name__, str(place), device]
            chosen = environment({"OPJIT_TEST_CORPUS": CHOSEN})
            done = subprocess.run(
                words,
                env=chosen,
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=2700,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            text = (place / "results.json").read_text(encoding="utf-8")
            kept.write_text(text, encoding="utf-8")
        found: Expected = json.loads(text)
        return found

    return run


@pytest.fixture(scope="session")
def expected(reference_run: Callable[..., Expected]) -> Expected:
    return reference_run()


def test_each_file_is_a_program_with_calls() -> None:
    files = {path.relative_to(CORPUS).with_suffix("").as_posix() for path in CORPUS.rglob("*.cpp")}
    assert files == set(BY_NAME)
    assert len(BY_NAME) == len(ALL)
    assert [one.name for one in ALL if len(one.calls) < 3 or not one.wrong] == []


@pytest.mark.corpus
@pytest.mark.timeout(3000)
def test_calls_fail_where_they_are_meant_to(expected: Expected) -> None:
    surprising = [
        (name, one["call"], one.get("error", "no error"))
        for name, outcomes in expected.items()
        for one in outcomes
        if one["call"] != "dir(m)" and ("error" in one) != (one["call"] in BY_NAME[name].wrong)
    ]
    assert surprising == []
    assert set(expected) == {program.name for program in CPU}


@pytest.mark.corpus
@pytest.mark.timeout(3000)
def test_results_are_the_same_each_time(
    expected: Expected, reference_run: Callable[..., Expected]
) -> None:
    again = reference_run(again=True)
    assert [name for name in expected if expected[name] != again[name]] == []


@pytest.mark.corpus
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", NAMES)
def test_a_program_does_what_torchs_headers_make_it_do(
    name: str, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = BY_NAME[name]

    def built(extension: Extension, *others: Any) -> Entry:
        if not extension.light and name in SLOW:
            pytest.skip(f"built with torch's own headers: {extension.reason}")
        assert extension.light, extension.reason
        return original(extension, *others)

    original = build.build
    monkeypatch.setattr(build, "build", built)
    module = fast_module(program)
    found = json.loads(json.dumps(results(module, program)))
    different = [
        (one, other)
        for one, other in zip(found, alone(expected[name], program), strict=True)
        if one != other
    ]
    assert different == []


def alone(outcomes: list[Outcome], program: Program) -> list[Outcome]:
    """The outcomes of a program that was built on its own: the reference is one module, with a namespace for each program."""
    text = (
        json.dumps(outcomes).replace("corpus_reference.", "").replace(f"{program.identifier}::", "")
    )
    own: list[Outcome] = json.loads(text)
    return own


@pytest.fixture(scope="session")
def expected_on_gpu(reference_run: Callable[..., Expected]) -> Expected:
    return reference_run("cuda")


@pytest.mark.corpus
@pytest.mark.gpu
@pytest.mark.nvcc
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", [program.name for program in CUDA])
def test_a_cuda_program_does_what_torchs_headers_and_nvcc_make_it_do(
    name: str, expected_on_gpu: Expected
) -> None:
    program = BY_NAME[name]
    module = fast_module(program)
    assert made_by(program) == {"light headers", "NVRTC"}
    found = json.loads(json.dumps(results(module, program, "cuda")))
    different = [
        (one, other)
        for one, other in zip(found, expected_on_gpu[name], strict=True)
        if one != other
    ]
    assert different == []


@pytest.mark.parametrize("name", [program.name for program in cuda.PROGRAMS][::9])
def test_a_cuda_program_needs_neither_nvcc_nor_a_gpu_to_be_built(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if identity.find_nvrtc(None) is None:
        pytest.skip("this torch has no NVRTC")
    monkeypatch.setenv("OPJIT_ARCH", "sm_80+sm_90")
    no_nvcc(monkeypatch)
    program = BY_NAME[name]
    fast_module(program)
    assert made_by(program) == {"light headers", "NVRTC"}


@pytest.mark.nvcc
def test_nvrtc_compiles_a_program_of_torchs_cuda_context_beside_nvcc_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if identity.find_nvrtc(None) is None:
        pytest.skip("this torch has no NVRTC")
    monkeypatch.setenv("OPJIT_ARCH", "sm_80")
    fast_module(BY_NAME["cuda/rms_norm"])
    assert made_by(BY_NAME["cuda/rms_norm"]) == {"light headers", "NVRTC"}


def made_by(program: Program) -> set[str]:
    """The headers and the compiler of the newest entry."""
    entries = Store(default_root()).base.glob(f"cpp_extension.{program.identifier}/*/*/{NAME}")
    described = json.loads(max(entries, key=os.path.getmtime).read_text(encoding="utf-8"))
    return {
        part.split()[0] if "NVRTC" in part else part
        for part in described["built_with"]["headers"].split("; ")
    }


@pytest.mark.corpus
@pytest.mark.nvcc
@pytest.mark.timeout(3000)
@pytest.mark.skipif(
    CHOSEN != "all", reason="nvcc takes four minutes; a machine with a GPU also runs them"
)
def test_cuda_programs_compile(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not on PATH")
    source = tmp_path / "all.cu"
    libraries = (
        Path(nvcc).resolve().parents[1] / "include" / "cusparse.h"
    ).exists()  # CUDAContext.h includes them all
    programs = [
        one for one in cuda.PROGRAMS if libraries or "CUDAContext.h" not in str(one.cuda_source)
    ]
    source.write_text(reference.merged_cuda(programs), encoding="utf-8")
    words = [nvcc, *reference.cuda_flags(), "-c", str(source), "-o", str(tmp_path / "all.o")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
