"""Run all tests that need a GPU, of both tiers, and name those that did not run: ``python -m tests.gpu``, with options of pytest.

Tests that measure have the GPU for themselves, before the others share it. It fails where torch sees no GPU, where a test fails, and where
fewer run than tests/floors.json says."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch


def main(arguments: list[str]) -> int:
    if not torch.cuda.is_available():
        print(f"No GPU test can run: torch {torch.__version__} sees no CUDA GPU.")
        return 1
    print(
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
        flush=True,
    )
    workers = ["-n", str(min(os.cpu_count() or 1, 8))] if importlib.util.find_spec("xdist") else []
    runs = (["-m", "gpu and alone"], ["-m", "gpu and not alone", *workers])
    codes = {
        subprocess.call(
            [sys.executable, "-m", "pytest", "--tier", "all", "--no-fold-skipped", *run, *arguments]
        )
        for run in runs
    }
    return max(
        codes - {pytest.ExitCode.NO_TESTS_COLLECTED},
        default=int(pytest.ExitCode.NO_TESTS_COLLECTED),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
