"""The author's flags, libraries and include folders, which are checked at declaration.

An allowed flag keeps opjit's promises: a binary's bytes follow from its key, it runs on every
machine of its arch, and loading it does not change the process. All other flags are rejected.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from opjit import backends
from opjit.backends import Flags
from opjit.backends.targets import Target
from opjit.errors import DeclarationError
from opjit.files import StrPath
from opjit.recipe import libraries, nvcc_flags, reads

# Allowed flags, each one argument. A macro can have any value, and all other values are plain
# words, which cannot name a file.
_MACRO = r"-[DU][A-Za-z_]\w*([(=].*)?"
_C = (
    rf"{_MACRO}|-O[0-3sgz]?|-W[a-z][\w+-]*(=[\w.+-]+)?|-w|-pedantic(-errors)?|-pthread|-std=(c|gnu)(1[178x]|2[3xy])|"
    r"-f[a-z][\w+-]*(=\w[\w.,+-]*)?|-mtune=[\w.+-]+|-mprefer-vector-width=\w+|-mno-[\w.-]+"
)
# Why a flag is rejected, and the alternative: the first match is reported.
_REASONS = [
    (
        r"-ffast-math|-Ofast|-funsafe-math-optimizations",
        "a library linked with it flushes denormals to zero in the whole process; use only "
        "the flags that the code needs: -fno-math-errno, "
        "-fno-trapping-math, -fno-signed-zeros, -fassociative-math, -ffinite-math-only",
    ),
    (
        r"-m(arch|cpu|tune)=native|-march=.*|-mcpu=.*|-m(avx|sse|fma|bmi|f16c|amx|popcnt|lzcnt|aes|sha|gfni|v?pclmul).*",
        "a binary must run on every machine of its arch, which is part of its key; build for a higher level "
        "with OPJIT_ARCH=x86-64-v4 or neoverse-v2, or give one function "
        "__attribute__((target(...))) and call it only if __builtin_cpu_supports allows it",
    ),
    (
        r"-?-(gencode|generate-code|arch|gpu-architecture|code|gpu-code)\b.*",
        "the target sets the arch, which is part of the key; choose it with OPJIT_ARCH=sm_90a or `opjit get OP --arch sm_90a`",
    ),
    (
        r"-(I|isystem|iquote|idirafter).*|--include-path.*",
        "pass include directories in extra_include_paths, so that their headers' content enters the key",
    ),
    (
        r"-(include|imacros).*|--pre-include.*|-Xcudafe=.*--preinclude.*",
        "write an #include line in the source, so that the header's content enters the key",
    ),
    (
        r"@.*|--?options-file.*|-Xptxas=.*-(-options-file|optf).*",
        "the file's content would not be in the key; write the flags themselves",
    ),
    (
        r"-g(?!enerate-line-info).*|-G|--?device-debug",
        "debug information holds paths of this machine; leave it out, and build the op for a debugger with OPJIT_DEBUG=1 or "
        "`opjit get --debug`",
    ),
    (
        r"-(l|L|Wl,|Xlinker|rdynamic|static|shared|pie|nostdlib|nodefaultlibs).*|-s",
        "opjit links every op in the same way, with the same exports and without a run "
        "path; name libraries and archives in extra_ldflags",
    ),
    (
        r"-Werror",
        "torch's builder passes a flag that gcc warns about in C; name the warnings: -Werror=vla",
    ),
    (
        r"-std=.*|-ansi",
        "an op's C is C11 or later (-std=gnu17), its CUDA is C++17 or later (-std=c++20)",
    ),
    (r"-x.*", "a kernel's language follows from its file: .c is C, .cu is CUDA"),
    (
        r"-fno-exceptions|-fno-unwind-tables|-f(fat-)?lto.*|-f(short-enums|short-wchar|pack-struct|pcc-struct-return|reg-struct-return|"
        r"visibility).*",
        "opjit's part of the library relies on the default; leave it out",
    ),
    (
        r"-f(.*plugin|profile|auto-profile|(test|condition|path)-coverage|dump|opt-info.*=|(file|debug|macro|profile)-prefix-map|compare-debug|"
        r"stack-usage|callgraph-info|save-|modules?\b|.*-file|.*(black|ignore|white|allow)list|use-ld|ld-path|offload|crash-diag|thin).*",
        "it reads or writes files that the key does not cover, or runs other programs; leave it out",
    ),
    (
        r"-(Xptxas|Xcompiler|Xcudafe)|--(ptxas-options|compiler-options)",
        "write option and value as one argument: '-Xcompiler=-Wall'",
    ),
    (r"[^-].*|-[DU]", "each flag is one argument and starts with '-': '-DNAME=value'"),
]
_OPTIMISES = r"-O.*|--?(generate-line-info|lineinfo)|-Xptxas=-?-O.*|-Xcompiler=-O\w*"


def check_flags(
    op: str,
    folder: Path,
    cflags: Sequence[str],
    cuda_cflags: Sequence[str],
    ldflags: Sequence[str],
    include_paths: Sequence[StrPath],
    cuda_ldflags: Sequence[str] = (),
    sources: Sequence[StrPath] = (),
) -> Flags:
    """Return an author's flags as Flags; paths start from the op's folder. Raises DeclarationError with an alternative to a bad one."""
    for parameter, flags in (("extra_ldflags", ldflags), ("extra_cuda_ldflags", cuda_ldflags)):
        _refuse_other_than_list(op, parameter, flags)
    c = _checked(op, "extra_cflags", cflags, _C)
    cuda = _checked(op, "extra_cuda_cflags", cuda_cflags, nvcc_flags.OF_AUTHORS)
    include = _paths(op, folder, "extra_include_paths", include_paths, "directory", os.path.isdir)
    link = libraries.resolve(op, "extra_ldflags", folder, ldflags)
    cuda_link = libraries.resolve(op, "extra_cuda_ldflags", folder, cuda_ldflags)
    added = _sources(op, folder, sources)
    return Flags(c, cuda, link, (), frozenset(), tuple(include), cuda_link, added)


def define(
    op: str, folder: Path, extra: Flags | None, c: Mapping[str, object], cuda: Mapping[str, object]
) -> Flags:
    """Add definitions to an author's flags for C and for CUDA. Raises DeclarationError for a value that a flag cannot hold."""
    of_c, of_cuda = ([f"-D{name}={value}" for name, value in each.items()] for each in (c, cuda))
    added = check_flags(op, folder, of_c, of_cuda, (), ())
    return (
        added
        if extra is None
        else extra._replace(c=(*extra.c, *added.c), cuda=(*extra.cuda, *added.cuda))
    )


def join(flags: Flags, extra: Flags, target: Target) -> Flags:
    """Add an author's flags to a backend's: libraries come first, as an archive may need the backend's."""
    include = (*flags.include, *extra.include)
    # First, because the last match wins.
    maps = [f"-ffile-prefix-map={{added{index}}}/=" for index in range(len(include))]
    if target.backend.compiler:
        # An author does not control the flags of other compilers.
        flags = flags._replace(c=(*maps, *flags.c))
    elif flags.cuda:
        for_host = (part for each in maps for part in ("-Xcompiler", each))
        flags = flags._replace(cuda=(*for_host, *flags.cuda, *extra.cuda))
    else:
        flags = flags._replace(c=(*maps, *flags.c, *extra.c))
    link = (*extra.link, *(extra.cuda_link if flags.cuda else ()), *flags.link)
    sources = tuple(path for path in extra.sources if backends.of_source(path) == target.backend)
    flags = flags._replace(link=link, include=include, sources=sources)
    return libraries.for_cuda(flags, target.runtime) if flags.cuda else flags


def for_debugger(flags: Flags) -> Flags:
    """Change flags into the flags of a debug build: frame pointers, code that a debugger follows
    to the original files, -G on devices.
    """
    # The random name of the build's folder must not be in the binary.
    host = (
        "-g",
        "-Og",
        "-fno-omit-frame-pointer",
        "-fdebug-prefix-map={staging}=/opjit",
    )
    c = (*(_keeping_paths(flag) for flag in flags.c if not re.fullmatch(_OPTIMISES, flag)), *host)
    cuda = tuple(_keeping_paths(flag) for flag in flags.cuda if not re.fullmatch(_OPTIMISES, flag))
    if cuda:
        cuda = (*cuda, "-G", *(part for flag in host for part in ("-Xcompiler", flag)))
    return flags._replace(c=c, cuda=cuda, debug=True)


def _keeping_paths(flag: str) -> str:
    """Let a prefix map change the text of __FILE__, but not the debug information."""
    return flag.replace("-ffile-prefix-map=", "-fmacro-prefix-map=")


def _checked(op: str, parameter: str, flags: Sequence[str], allowed: str) -> tuple[str, ...]:
    _refuse_other_than_list(op, parameter, flags)
    for flag in flags:
        host = flag.removeprefix("-Xcompiler=") if allowed is nvcc_flags.OF_AUTHORS else flag
        for part in [*(host.split(",") if host != flag else []), flag]:
            reason = _reason(part, allowed if part is flag else _C)
            if reason is not None:
                raise DeclarationError(f"{op}: {parameter} cannot hold {flag!r}: {reason}")
        if allowed is nvcc_flags.OF_AUTHORS and re.search(r"[$`\\]", flag):
            raise DeclarationError(
                f"{op}: {parameter} cannot hold {flag!r}: nvcc passes its flags to a shell, which would expand what "
                "follows $, ` or \\; write the text in the source"
            )
    # Braces are placeholders in Flags.
    return tuple(flag.replace("{", "{{").replace("}", "}}") for flag in flags)


def _refuse_other_than_list(op: str, parameter: str, flags: object) -> None:
    if not _is_list(flags, str):
        raise DeclarationError(
            f"{op}: {parameter} is a list of strings, one compiler argument each, not {flags!r}"
        )


def _is_list(values: object, of: type | tuple[type, ...]) -> bool:
    return (
        isinstance(values, Sequence)
        and not isinstance(values, str)
        and all(isinstance(value, of) for value in values)
    )


def _reason(flag: str, allowed: str) -> str | None:
    if not flag.isprintable():
        return "a flag must not contain a line break or a control character"
    reason = next((reason for pattern, reason in _REASONS if re.fullmatch(pattern, flag)), None)
    if re.fullmatch(allowed, flag) and (reason is None or flag.startswith("-std=")):
        return None
    return reason or (
        "opjit does not support this flag, because its effect is unknown; it supports macros, "
        "optimization, warnings and code generation (-f...), with plain words as values"
    )


def _sources(op: str, folder: Path, paths: Sequence[StrPath]) -> tuple[str, ...]:
    found = _paths(op, folder, "extra_sources", paths, "file", os.path.isfile)
    for path, absolute in zip(paths, found, strict=True):
        if backends.of_source(absolute) is None:
            suffixes = ", ".join(backend.suffix for backend in backends.all_backends())
            raise DeclarationError(
                f"{op}: extra_sources names {os.fspath(path)!r}; expected a source for a backend, which ends in "
                f"{suffixes}; build C++ code with opjit.load, or link it as a static archive"
            )
    return tuple(found)


def _paths(
    op: str,
    folder: Path,
    parameter: str,
    paths: Sequence[StrPath],
    kind: str,
    exists: Callable[[str], bool],
) -> list[str]:
    """Return absolute paths, where each of `kind` must exist; relative ones start from the op's folder."""
    if not _is_list(paths, (str, os.PathLike)):
        raise DeclarationError(f"{op}: {parameter} is a list of paths, not {paths!r}")
    found = [reads.normalized(os.path.join(folder, path)) for path in paths]
    for path, absolute in zip(paths, found, strict=True):
        if not exists(absolute):
            raise DeclarationError(
                f"{op}: {parameter} names {os.fspath(path)!r}, but there is no {kind} {absolute}; a relative path "
                f"starts from {folder}"
            )
    return found
