"""The author's own flags, libraries and include folders, checked at declaration.

An allowed flag keeps opjit's promises: a binary's bytes follow from its key, it runs on every machine of its arch, and loading it does
not change the process. Any other flag is rejected with an alternative.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from opjit.backends import Flags
from opjit.errors import DeclarationError
from opjit.recipe import headers

# Allowed flags, each one argument. Their values are free, except that they name no file, folder or machine.
_C = re.compile(r"-[DU][A-Za-z_]\w*([(=].*)?|-O[0-3sgz]?|-W(?![lpa],).+|-w|-pedantic(-errors)?|-pthread|-std=(c|gnu)(1[178x]|2[3xy])|-f.+|"
                r"-mtune=.+|-mprefer-vector-width=\w+|-mno-.+")
_CUDA = re.compile(r"-[DU][A-Za-z_]\w*([(=].*)?|-O[0-3]|-W[a-z].*|-w|-std=c\+\+(17|2\d)|--?use_fast_math|"
                   r"--?(ftz|prec-div|prec-sqrt|fmad)=\w+|--?maxrregcount=\d+|--?(expt-)?(relaxed-constexpr|extended-lambda)|"
                   r"--?extra-device-vectorization|--?restrict|--?diag-(suppress|warn|error)=[\d,]+|-Xptxas=.+|-Xcompiler=.+|"
                   r"-Xcudafe=--(diag_(suppress|remark|warning|error)=\w+|display_error_number|promote_warnings)")
_LINK = re.compile(r"-l[\w+.-]+")
# Why a flag is rejected, and the alternative: the first match is reported.
_REASONS = [(re.compile(pattern), reason) for pattern, reason in [
    (r"-ffast-math|-Ofast|-funsafe-math-optimizations",
     "a library linked with it flushes denormals to zero in the whole process; name what the code needs: -fno-math-errno, "
     "-fno-trapping-math, -fno-signed-zeros, -fassociative-math, -ffinite-math-only"),
    (r"-m(arch|cpu|tune)=native|-march=.*|-mcpu=.*|-m(avx|sse|fma|bmi|f16c|amx|popcnt|lzcnt|aes|sha|gfni|v?pclmul).*",
     "a binary must run on every machine of its arch, which is part of its key; build for a higher level with OPJIT_ARCH=x86-64-v4, or "
     "give one function __attribute__((target(...))) and call it only if __builtin_cpu_supports says so"),
    (r"-?-(gencode|generate-code|arch|gpu-architecture|code|gpu-code)\b.*",
     "the target sets the arch, which is part of the key; choose it with OPJIT_ARCH=sm_90a or `opjit get OP --arch sm_90a`"),
    (r"-(I|isystem|iquote|idirafter).*|--include-path.*",
     "pass include folders in extra_include_paths, so that their headers' content enters the key"),
    (r"-(include|imacros).*|--pre-include.*|-Xcudafe=.*--preinclude.*",
     "write an #include line in the source, so that the header's content enters the key"),
    (r"@.*|--?options-file.*|-Xptxas=.*-(-options-file|optf).*",
     "the file's content would not be in the key; write the flags themselves"),
    (r"-g.*|-G|--?lineinfo|--?generate-line-info|--?device-debug",
     "opjit keeps no debug information, as that holds paths of this machine; leave it out"),
    (r"-(l|L|Wl,|Xlinker|rdynamic|static|shared|pie|nostdlib|nodefaultlibs).*|-s",
     "opjit links every op in the same way, with the same run path and exports; extra_ldflags takes libraries only: '-lNAME'"),
    (r"-Werror", "torch's builder passes a flag that gcc warns about in C; name the warnings: -Werror=vla"),
    (r"-std=.*|-ansi", "an op's C is C11 or later (-std=gnu17), its CUDA is C++17 or later (-std=c++20)"),
    (r"-x.*", "a kernel's language follows from its file: .c is C, .cu is CUDA"),
    (r"-fno-exceptions|-fno-unwind-tables", "torch's exceptions pass through the op's library; leave it out"),
    (r"-f(short-enums|short-wchar|pack-struct|pcc-struct-return|reg-struct-return|visibility).*",
     "opjit's part of the library relies on the default; leave it out"),
    (r"-f(plugin|profile|auto-profile|(test|condition|path)-coverage|dump|opt-info.*=|(file|debug|macro|profile)-prefix-map).*",
     "it reads or writes files that the key does not cover; leave it out"),
    (r"-(Xptxas|Xcompiler|Xcudafe)|--(ptxas-options|compiler-options)", "write option and value as one argument: '-Xcompiler=-Wall'"),
    (r"[^-].*|-[DU]", "each flag is one argument and starts with '-': '-DNAME=value'"),
]]
_TIED = re.compile(r"-l(torch|c10|python|shm|opjit|aoti).*")


def check(op: str, folder: Path, cflags: Sequence[str], cuda_cflags: Sequence[str], ldflags: Sequence[str],
          include_paths: Sequence[str | os.PathLike[str]]) -> Flags:
    """Check the flags of an op's declaration and return them as Flags.

    Args:
        folder: of the op; relative include folders are relative to it.

    Raises:
        DeclarationError: a flag is rejected; the message names it and an alternative.
    """
    return Flags(_checked(op, "extra_cflags", cflags, _C), _checked(op, "extra_cuda_cflags", cuda_cflags, _CUDA),
                 _checked(op, "extra_ldflags", ldflags, _LINK), (), frozenset(), _folders(op, folder, include_paths))


def join(flags: Flags, extra: Flags) -> Flags:
    """Append an author's flags to a backend's: those for the language of the backend's kernels."""
    maps = [f"-ffile-prefix-map={{added{index}}}/=" for index in range(len(extra.include))]  # first, as the last match wins
    if flags.cuda:
        for_host = (part for each in maps for part in ("-Xcompiler", each))
        flags = flags._replace(cuda=(*for_host, *flags.cuda, *extra.cuda))
    else:
        flags = flags._replace(c=(*maps, *flags.c, *extra.c))
    return flags._replace(link=(*flags.link, *extra.link), include=extra.include)


def _checked(op: str, parameter: str, flags: Sequence[str], allowed: re.Pattern[str]) -> tuple[str, ...]:
    if not _is_list(flags, str):
        raise DeclarationError(f"{op}: {parameter} is a list of strings, one compiler argument each, not {flags!r}")
    for flag in flags:
        host = flag.removeprefix("-Xcompiler=")
        for part in host.split(",") if host != flag else [flag]:
            reason = _reason(part, _C if host != flag else allowed)
            if reason is not None:
                raise DeclarationError(f"{op}: {parameter} cannot hold {flag!r}: {reason}")
        if allowed is _CUDA and ("$" in flag or "`" in flag):
            raise DeclarationError(f"{op}: {parameter} cannot hold {flag!r}: nvcc passes its flags to a shell, which would expand what "
                                   "follows $ or `; write such a text in the source")
    return tuple(flag.replace("{", "{{").replace("}", "}}") for flag in flags)  # braces are placeholders in Flags


def _is_list(values: object, of: type | tuple[type, ...]) -> bool:
    """Whether `values` is a list or tuple of such values, and not a string."""
    return isinstance(values, Sequence) and not isinstance(values, str) and all(isinstance(value, of) for value in values)


def _reason(flag: str, allowed: re.Pattern[str]) -> str | None:
    """Why a flag is rejected; None if it is allowed."""
    if not flag.isprintable():
        return "a flag has no line break or control character"
    if allowed is _LINK:
        if _TIED.fullmatch(flag):
            return "it would tie the binary to one version of torch or Python; opjit.h has what an op needs of torch"
        return None if allowed.fullmatch(flag) else "it takes system libraries only: '-lNAME'"
    reason = next((reason for pattern, reason in _REASONS if pattern.fullmatch(flag)), None)
    if allowed.fullmatch(flag) and (reason is None or flag.startswith("-std=")):
        return None
    return reason or "opjit does not know its effect; it knows macros, optimisation, warnings and code generation (-f...)"


def _folders(op: str, folder: Path, paths: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    if not _is_list(paths, (str, os.PathLike)):
        raise DeclarationError(f"{op}: extra_include_paths is a list of folders, not {paths!r}")
    found = tuple(headers.normalized(os.path.join(folder, path)) for path in paths)
    for path, absolute in zip(paths, found, strict=True):
        if not os.path.isdir(absolute):
            raise DeclarationError(f"{op}: extra_include_paths names {os.fspath(path)!r}, but there is no folder {absolute}; "
                                   f"a relative path starts from {folder}")
    return found
