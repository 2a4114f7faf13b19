"""setup.py's command build_ext with opjit's cache, for the extensions that `load` supports. torch builds the rest."""

import os
import re
import sys
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import Any

import setuptools  # type: ignore[import-untyped,unused-ignore]
import torch
from setuptools.errors import CompileError  # type: ignore[import-untyped,unused-ignore]

from opjit import request
from opjit.builder import torch_builder
from opjit.builder.torch_builder import quoted
from opjit.cpp_extension import binary
from opjit.cpp_extension.arguments import LoadCall
from opjit.cpp_extension.identity import Unsupported
from opjit.errors import OpjitError
from opjit.progress import logger
from opjit.store.store import default_store

_SUFFIXES = {".cpp", ".cc", ".cxx", ".c++", ".C", ".c", ".cu"}
_Torchs: Any = torch_builder.torch_module().BuildExtension


class BuildExtension(_Torchs):  # type: ignore[misc]
    """torch's BuildExtension with opjit's cache: an extension is built as `opjit.load` builds it, and copied to its place.

    It supports the options of torch, CppExtension and CUDAExtension, and the flags of setuptools and its environment (CFLAGS, LDFLAGS),
    for example -O3 and -DNDEBUG. torch's BuildExtension builds extensions with SYCL, ROCm, ``dlink``, ``py_limited_api``, a project's
    subclass of Extension, or sources other than C++ and CUDA. A warning reports each of them. ``use_ninja=False`` changes nothing,
    because the result is the same.

    Raises:
        CompileError: of setuptools, with opjit's message, which setup.py shows without frames.

    Example:
        >>> from opjit.cpp_extension import BuildExtension, CppExtension
        >>> arguments = {"ext_modules": [CppExtension("ext", ["ext.cpp"])], "cmdclass": {"build_ext": BuildExtension}}  # of setup()
    """

    extensions: list[Any]

    def build_extensions(self) -> None:
        """Build all extensions.

        torch's method requires a CUDA Toolkit for CUDA, so it gets only the extensions that opjit cannot build.
        """
        extensions = self.extensions
        reasons = {id(each): reason for each in extensions if (reason := self._refusal(each))}
        theirs = [each for each in extensions if id(each) in reasons]
        try:
            self.extensions = [each for each in extensions if id(each) not in reasons]
            super(_Torchs, self).build_extensions()
            for each in theirs:
                name = getattr(each, "name", each)
                logger().warning(
                    "torch's BuildExtension builds %s, without opjit's cache: %s",
                    name,
                    reasons[id(each)],
                )
            if theirs:
                self.extensions = theirs
                super().build_extensions()
        finally:
            self.extensions = extensions

    def build_extension(self, ext: Any) -> None:
        """Build one extension. A project's subclass may also call this."""
        if self._refusal(ext):
            super().build_extension(ext)
            return
        place = Path(self.get_ext_fullpath(ext.name))
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            wanted = binary.of_call(self._call(ext), default_store().notes)
            find = partial(request.obtain, wanted)
            request.use_entry(find, lambda entry: binary.copy_library(entry, place))
        except OpjitError as error:
            raise CompileError(str(error)) from None  # setuptools shows it without frames
        except (Unsupported, TypeError):
            raise CompileError(
                f"{ext.name}: its sources and flags must be strings in lists"
            ) from None

    def _refusal(self, ext: Any) -> str | None:
        """Return the reason to use torch's BuildExtension, or None."""
        if sys.platform != "linux" or torch.version.hip:
            return "opjit builds C++ for Linux, and CUDA"
        if type(ext) is not setuptools.Extension:
            return f"it is a {type(ext).__name__}"
        if getattr(ext, "py_limited_api", False):
            return "py_limited_api gives its file another name and other libraries"
        unknown = {os.path.splitext(source)[1] for source in ext.sources} - _SUFFIXES
        if unknown or not ext.sources:
            return f"opjit does not compile {', '.join(sorted(unknown)) or 'an extension without sources'}"
        given = ext.extra_compile_args
        others = (
            [language for language in given if language not in ("cxx", "nvcc") and given[language]]
            if isinstance(given, dict)
            else []
        )
        return f"opjit does not support flags for {', '.join(others)}" if others else None

    def _call(self, ext: Any) -> LoadCall:
        """Return the call of load that makes the binary of setuptools' and torch's commands."""
        compiler = self.compiler
        given = ext.extra_compile_args
        cxx, nvcc = (
            (given.get("cxx", []), given.get("nvcc", []))
            if isinstance(given, dict)
            else (given, given)
        )
        macros = [*ext.define_macros, *((name,) for name in ext.undef_macros)]
        # torch's BuildExtension makes the options in the same way.
        options = compiler._setup_compile(self.build_temp, macros, ext.include_dirs, [], [], [])[3]
        common = [
            *(word for word in options if not word.startswith("-I")),
            *(["-g"] if self.debug else []),
        ]
        folders = [os.path.abspath(word[2:]) for word in options if word.startswith("-I")]
        torchs = os.path.dirname(torch.__file__)
        cflags = quoted([*_arguments(compiler.compiler_so), *common, *cxx])
        cuda_cflags = quoted([*common, *nvcc])
        include = [folder for folder in folders if not folder.startswith(torchs)]
        with_cuda = any(os.fspath(source).endswith(".cu") for source in ext.sources)
        ldflags = quoted(map(_in_place, self._link_words(ext)))
        name = ext.name.rpartition(".")[2]
        folder = os.getcwd()
        return LoadCall(
            name=name,
            sources=[*ext.sources],
            verbose=self.verbose > 1,
            extra_cflags=cflags,
            extra_cuda_cflags=cuda_cflags,
            extra_include_paths=include,
            extra_ldflags=ldflags,
            build_directory=folder,
            with_cuda=with_cuda,
        )

    def _link_words(self, ext: Any) -> list[str]:
        compiler = self.compiler
        run_path = [
            compiler.runtime_library_dir_option(folder)
            for folder in (*ext.runtime_library_dirs, *compiler.runtime_library_dirs)
        ]
        return [
            *_arguments(compiler.linker_so),
            *compiler.objects,
            *ext.extra_objects,
            *(
                f"-L{os.path.abspath(folder)}"
                for folder in (*ext.library_dirs, *compiler.library_dirs)
            ),
            *(
                word
                for words in run_path
                for word in ([words] if isinstance(words, str) else words)
            ),
            *(f"-l{name}" for name in (*self.get_libraries(ext), *compiler.libraries)),
            *ext.extra_link_args,
        ]


def _arguments(command: list[str]) -> list[str]:
    """Return a command without the program, which may be two words: ``ccache g++``."""
    return list(dropwhile(lambda word: not word.startswith("-"), command))


def _in_place(word: str) -> str:
    """Return a word for the linker with absolute paths, because ninja runs the linker in another directory."""
    return "".join(
        os.path.abspath(part) if os.path.isfile(part) else part
        for part in re.split(r"([,=])", word)
    )
