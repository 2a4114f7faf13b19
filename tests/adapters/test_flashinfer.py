"""FlashInfer's modules: its builder is opjit's, and a tree has modules that it loads without a compiler. Most tests need no FlashInfer."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from opjit.share import trust
from tests import helpers
from tests.helpers import ROOT, command, entries, open_to_group

# A package with the interface of FlashInfer 0.7.4 that the adapter uses. Its specs compile for the CPU.
STAND_IN = {
    "__init__.py": "",
    "jit/__init__.py": """
from types import SimpleNamespace

from flashinfer.jit import core, env

current_compilation_context = SimpleNamespace(TARGET_CUDA_ARCHS={(9, "0a"), (8, "0")})
""",
    "jit/env.py": 'flashinfer_version = "0.7.4"\n',
    "jit/cpp_ext.py": """
def get_cuda_path():
    return "/toolkit"

def parse_env_flags(name):
    return []
""",
    "jit/core.py": """
import os
from pathlib import Path


class JitSpecNvcc:
    is_aot = False
    needs_device_linking = False
    extra_ldflags = extra_cuda_cflags_by_source = embedded_cubin_factory = None

    def __init__(self, name, source):
        self.name = name
        self.sources = [source]

    @property
    def jit_library_path(self):
        return Path(os.environ["FLASHINFER_WORKSPACE_BASE"], self.name, f"{self.name}.so")

    def get_library_path(self):
        return self.jit_library_path

    def get_compile_commands(self):
        flags = '-DVALUE=7 -DTEXT="a b" -ccbin other -isystem /toolkit/include'
        return [{"file": self.sources[0], "command": f"c++ -c {self.sources[0]} {flags} -o page.o"}]

    def build(self, verbose=None, need_lock=False):
        raise SystemExit("FlashInfer builds")
""",
}
BUILD = """
import ctypes
import sys
from flashinfer.jit.core import JitSpecNvcc

spec = JitSpecNvcc("page", {source!r})
spec.build()
print(ctypes.CDLL(str(spec.jit_library_path)).value())
"""
EXPORT = """
import sys
from flashinfer.jit.core import JitSpecNvcc
from opjit.adapters import flashinfer

flashinfer.export(sys.argv[1], [JitSpecNvcc("page", {source!r})])
"""
LOAD = """
import ctypes
import flashinfer_jit_cache
import mine

[provider] = flashinfer_jit_cache.get_jit_cache_providers()
print(provider.version == flashinfer_jit_cache.__version__, provider.cuda_architectures, mine.NAME)
for name in provider.modules:
    print(ctypes.CDLL(f"{provider.jit_cache_dir}/{name}/{name}.so").value())
"""
SPEC = "from flashinfer.jit import page\nspec = page.gen_page_module()\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the package, a source, and programs that build, export and load it."""
    for name, text in STAND_IN.items():
        place = tmp_path / "site" / "flashinfer" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    (tmp_path / "site" / "mine.py").write_text("NAME = 'mine'\n")
    source = tmp_path / "page.cpp"
    source.write_text('extern "C" int value() { return VALUE; }\n')
    for name, text in {"build": BUILD, "export": EXPORT, "load": LOAD}.items():
        (tmp_path / f"{name}.py").write_text(text.replace("{source!r}", repr(str(source))))
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "workspace"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{ROOT}")
    return tmp_path


def run(*words: str | Path, **changes: str) -> str:
    done = command("run", *words, **changes)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_flashinfer_builds_through_the_cache_and_a_changed_module_is_replaced(folder: Path) -> None:
    module = folder / "workspace/page/page.so"
    assert run(folder / "build.py") == "7\n"
    [entry] = entries(folder / "cache")
    content = module.read_bytes()
    assert content == (entry / "page.so").read_bytes()
    module.write_bytes(content[:-1] + b"x")
    assert run(folder / "build.py", OPJIT_OFFLINE="1") == "7\n"
    assert module.read_bytes() == content


@pytest.mark.parametrize(
    ("feature", "changes"),
    [
        ("extra_cuda_cflags_by_source = {'page.cu': []}", {}),
        ("embedded_cubin_factory = print", {}),
        ("is_aot = False", {"FLASHINFER_DISABLE_JIT": "1"}),
    ],
)
def test_flashinfer_builds_what_opjit_cannot_build(
    folder: Path, feature: str, changes: dict[str, str]
) -> None:
    program = folder / "build.py"
    program.write_text(program.read_text().replace("spec.build", f"spec.{feature}\nspec.build"))
    done = command("run", program, **changes)
    assert (done.returncode, done.stderr) == (1, "FlashInfer builds\n")


def test_a_module_that_others_can_replace_is_not_loaded(folder: Path) -> None:
    (folder / "workspace/page").mkdir(parents=True)
    open_to_group(folder / "workspace/page")
    done = command("run", folder / "build.py")
    assert "UntrustedFolder: FlashInfer's module page is not loaded: " in done.stderr


def test_exported_modules_start_from_a_signed_tree_without_a_compiler(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, public = trust.keygen("ci", folder / "keys")
    monkeypatch.setenv("OPJIT_TRUST", public)
    run(folder / "export.py", folder / "modules")
    packed = command(
        *("cache", "pack", folder / "tree", "--tree", "PYTHONPATH", folder / "modules"),
        *("--sign", key),
    )
    assert packed.stdout == "packed 2, 0 already there, 0 left out\n", packed.stderr
    (folder / "modules").rename(folder / "elsewhere")
    printed = run("--tree", folder / "tree", folder / "load.py", PATH="/nowhere")
    assert printed == "True ['sm80', 'sm90a'] mine\n7\n"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("flashinfer") is None, reason="FlashInfer is not installed")
def test_flashinfer_itself_finds_exported_modules(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer's loader checks the version, the architectures and the names. It would refuse the content, which is no module."""
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    helpers.fresh(
        f"""
{SPEC}
from opjit.adapters import flashinfer
spec.jit_library_path.parent.mkdir(parents=True)
spec.jit_library_path.write_bytes(b"content")
type(spec).build = lambda spec: None
flashinfer.export({str(folder / "modules")!r}, [spec])
""",
        {"PYTHONPATH": str(ROOT)},
    )
    code = f"{SPEC}\nprint(spec.is_aot, spec.get_library_path().read_text())\n"
    path = f"{folder / 'modules'}{os.pathsep}{ROOT}"
    assert helpers.fresh(code, {"PYTHONPATH": path}).stdout == "True content\n"
    other = {"PYTHONPATH": path, "FLASHINFER_CUDA_ARCH_LIST": "10.0a"}
    assert helpers.fresh(f"{SPEC}\nprint(spec.is_aot)\n", other).stdout == "False\n"
