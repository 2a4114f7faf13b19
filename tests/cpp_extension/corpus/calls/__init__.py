"""The corpus: every program with its calls, one module for each theme."""

import os

from tests.cpp_extension.corpus.calls import (
    autograd,
    bindings,
    cuda,
    elementwise,
    errors,
    factories,
    library,
    matmul,
    nn,
    odd,
    reductions,
    scans,
    signatures,
    views,
)
from tests.cpp_extension.corpus.program import Program

_THEMES = (elementwise, reductions, matmul, nn, scans, factories, views, signatures, errors, bindings, autograd, library, odd)
CHOSEN = os.environ.get("OPJIT_TEST_CORPUS", "")  # all, or a number: then every so many-th program is the corpus
CPU: list[Program] = [program for theme in _THEMES for program in theme.PROGRAMS][:: int(CHOSEN) if CHOSEN.isdigit() else 1]
# A number, for example of the day: then only that fourth of the CUDA programs is tried, because nvcc takes minutes for all.
TURN = os.environ.get("OPJIT_TEST_TURN", "")
CUDA: list[Program] = cuda.PROGRAMS[int(TURN) % 4 :: 4] if TURN.isdigit() else cuda.PROGRAMS
