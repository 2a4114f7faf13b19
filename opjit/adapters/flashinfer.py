"""FlashInfer's modules: built by opjit.build, and exported for a start without a compiler.

    opjit run serve.py                                     FlashInfer builds its modules through opjit's cache
    opjit cache pack modules.tree --tree PYTHONPATH DIR    packs modules that `export` has written into DIR

FlashInfer looks for prebuilt modules in a package with the name flashinfer_jit_cache, and loads them without a compiler.
"""

import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from opjit import files, resources
from opjit.errors import UntrustedFolder
from opjit.files import StrPath
from opjit.shared_library import build as build_library


def replace_build(kind: Any) -> None:
    """Replace the method `build` of FlashInfer's JitSpecNvcc.

    FlashInfer still locks, loads, and builds modules with flags for one source or with embedded cubins.
    """
    theirs = kind.build

    def build(spec: Any, verbose: bool | None = None, need_lock: bool = False) -> None:
        if (
            spec.extra_cuda_cflags_by_source
            or spec.embedded_cubin_factory
            or os.environ.get("FLASHINFER_DISABLE_JIT")
        ):
            theirs(spec, verbose, need_lock)
            return
        place = spec.jit_library_path
        files.make_private(place.parent)
        files.write_whole(place, _library(spec).read_bytes(), synced=False)
        problem = files.replacement_risk(place)
        if problem is not None:
            raise UntrustedFolder(
                f"FlashInfer's module {spec.name} is not loaded: {problem}; "
                "set FLASHINFER_WORKSPACE_BASE to a directory that only you can write"
            )

    kind.build = build


def export(folder: StrPath, specs: Iterable[Any]) -> None:
    """Build modules, and write them into a directory as the package flashinfer_jit_cache.

    A process with this directory on PYTHONPATH loads the modules without a compiler. FlashInfer ignores the package if its version or
    its architectures don't match.

    Args:
        folder: the directory.
        specs: the modules, as FlashInfer's functions ``gen_…_module`` return them.

    Example:
        >>> from flashinfer.jit import page
        >>> opjit.adapters.flashinfer.export("modules", [page.gen_page_module()])
    """
    from flashinfer import jit

    package = Path(folder, "flashinfer_jit_cache")
    modules = []
    for spec in specs:
        if not spec.is_aot:
            spec.build()
        place = package / spec.name / f"{spec.name}.so"
        place.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(place, spec.get_library_path().read_bytes())
        modules.append(spec.name)
    archs = sorted(
        f"sm{major}{minor}" for major, minor in jit.current_compilation_context.TARGET_CUDA_ARCHS
    )
    text = resources.filled(
        "flashinfer_jit_cache.py.in",
        version=jit.env.flashinfer_version,
        archs=archs,
        modules=modules,
    )
    files.write_whole(package / "__init__.py", text.encode())


def _library(spec: Any) -> Path:
    """Return the verified library of a module's sources, which opjit builds if no cache has it."""
    from flashinfer.jit import cpp_ext

    # opjit chooses the host compiler, and nvcc finds its headers.
    left_out = rf"-ccbin \S+ |-isystem {re.escape(cpp_ext.get_cuda_path())}/include "
    flags = dict[str, list[str]]()
    for each in spec.get_compile_commands():
        words = shlex.split(re.sub(left_out, "", each["command"]))
        flags[Path(each["file"]).suffix] = words[3:-2]  # COMPILER -c SOURCE ... -o OBJECT
    cuda = flags.pop(".cu", [])
    if spec.needs_device_linking:
        cuda.append("-rdc=true")
    more = cpp_ext.parse_env_flags("FLASHINFER_EXTRA_LDFLAGS")
    ldflags = ["-lcuda", *more, *(spec.extra_ldflags or [])]
    return build_library(
        spec.name,
        spec.sources,
        cflags=next(iter(flags.values()), []),
        cuda_cflags=cuda,
        ldflags=ldflags,
        launcher=shlex.split(os.environ.get("FLASHINFER_NVCC_LAUNCHER", "")),
    )
