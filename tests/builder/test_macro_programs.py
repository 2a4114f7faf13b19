"""Drawn programs that are full of macros: NVRTC's machine code is nvcc's, and light headers see the text that torch's headers make."""

import random
from pathlib import Path

import pytest

from opjit.cpp_extension.identity import own_folders
from opjit.cpp_extension.light import macros, streams
from opjit.recipe import toolchain
from opjit.store.store import Store, default_root
from tests.builder.test_cuda import needs_nvrtc
from tests.builder.test_preprocessed import USE, machine_codes

OF_NVCC = [
    "__NVCC__",
    "__CUDACC__",
    "__CUDACC_RTC__",
    "CUDA_VERSION",
    "CUDART_VERSION",
    "__CUDA_ARCH__",
    "__CUDACC_VER_MAJOR__",
    "__CUDACC_VER_MINOR__",
    "__GNUC__",
    "__cplusplus",
    "NDEBUG",
    "__CUDA_FP16_H__",
    "CHAR_MAX",
    "RAND_MAX",
    "M_PI_4",
    "INT_MAX",
]
OF_TORCH = [
    "AT_PARALLEL_OPENMP",
    "AT_MKL_ENABLED",
    "C10_LIKELY",
    "C10_HOST_DEVICE",
    "HAVE_UNISTD_H",
    "PYBIND11_VERSION_MAJOR",
    "INT_MAX",
    "M_PI",
    "AT_DISPATCH_SWITCH",
    "STRIP_ERROR_MESSAGES",
    "NDEBUG",
]
CUDA_HEADERS = [
    "cuda.h",
    "cuda_fp16.h",
    "math.h",
    "stdlib.h",
    "limits.h",
    "assert.h",
    "cooperative_groups.h",
]


def condition(draw: random.Random, names: list[str]) -> str:
    """A condition on macros, behind another macro or not."""
    name = draw.choice(names)
    kind = draw.randrange(5)
    if kind == 0:
        return f"defined({name})"
    if kind == 1:
        return f"!defined {name} || defined({draw.choice(names)})"
    if kind == 2:
        return f"defined(M{draw.randrange(3)})"
    cut = draw.randrange(1, len(name))
    return (
        f"defined({name}) && CAT({name[:cut]}, {name[cut:]}) + 0 > {draw.choice([0, 1, 10, 1100])}"
    )


def program(draw: random.Random, names: list[str], body: str) -> str:
    """Definitions and branches, and functions whose text depends on them."""
    whole = [
        name for name in names if name not in ("C10_LIKELY", "AT_DISPATCH_SWITCH", "M_PI", "M_PI_4")
    ]
    lines = [
        "#define CAT(a, b) CAT_(a, b)",
        "#define CAT_(a, b) a##b",
        "#define TEXT(a) TEXT_(a)",
        "#define TEXT_(a) #a",
    ]
    for number in range(3):
        lines.append(f"#if {condition(draw, [one for one in whole if one[:2] != 'C1'])}")
        lines.append(f"#define M{number} {draw.choice(['1', draw.choice(whole), '(__LINE__)'])}")
        lines.append("#endif")
    for number in range(4):
        lines.append(f"#if {condition(draw, [one for one in whole if one[:2] != 'C1'])}")
        lines.append(body.replace("NAME", f"f{number}").replace("VALUE", str(number + 2)))
        lines.append("#else")
        text = f"TEXT({draw.choice(names)})[0]"
        lines.append(body.replace("NAME", f"f{number}").replace("VALUE", text))
        lines.append("#endif")
    return "\n".join(lines) + "\n"


@pytest.mark.nvcc
@pytest.mark.slow
@needs_nvrtc
def test_drawn_device_code_is_that_of_nvcc(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    for number in range(12):
        draw = random.Random(f"{seed} {number}")
        includes = draw.sample(CUDA_HEADERS, draw.randrange(4))
        text = "".join(f"#include <{name}>\n" for name in includes)
        text += program(draw, OF_NVCC, "__device__ float NAME(float v) { return v * VALUE; }")
        text += "__device__ float pick(float v) { return f0(v) + f1(v) + f2(v) + f3(v); }\n" + USE
        folder = tmp_path / str(number)
        folder.mkdir()
        fast, slow = machine_codes(text, folder)
        assert fast == slow, text


@pytest.mark.slow
@pytest.mark.torch
def test_drawn_text_is_that_of_torchs_headers(tmp_path: Path) -> None:
    """The macros that are kept make the text that torch's headers make."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    torchs = own_folders()
    system = [word for folder in torchs for word in ("-isystem", folder)]
    for number in range(10):
        draw = random.Random(f"{seed} {number}")
        first = draw.choice(["", "#define NDEBUG 1\n", "#include <vector>\n", "#include <cmath>\n"])
        names = [
            "torch/extension.h",
            *draw.sample(["ATen/ATen.h", "torch/library.h"], draw.randrange(3)),
        ]
        text = first + "".join(f"#include <{name}>\n" for name in names)
        text += program(draw, OF_TORCH, "inline double NAME() { return VALUE; }")
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "a.cpp").write_text(text)
        preprocessor = streams.Preprocessor(
            toolchain.require_cxx(None),
            Store(default_root()).base,
            folder,
            folder / "scratch",
            ["-std=c++20", "-fPIC", *draw.choice([[], ["-O2"]]), *system],
            "a.cpp",
            macros.Surroundings(),
            tuple(torchs),
        )
        kept = preprocessor.lines_of(preprocessor.text_with_torchs())
        read = preprocessor.lines_of(preprocessor.run(preprocessor.real()))
        streams.compare(read, kept)
