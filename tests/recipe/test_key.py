"""The key: everything that decides a binary flips it, nothing else does."""

import json
import os
import socket
import time
from dataclasses import fields, replace
from pathlib import Path
from platform import machine
from typing import Any

import pytest

from opjit import backends, resources
from opjit.backends import Flags, targets
from opjit.builder import build
from opjit.errors import BuildError
from opjit.recipe import build_inputs, recipe, schema, toolchain
from opjit.recipe.recipe import Recipe
from opjit.store.entry import read
from opjit.store.store import Store
from tests import helpers
from tests.helpers import PLUS, describe, fake_nvcc, write_op

GCC = {"cc.version": "gcc version 12.2.0", "cc.machine": "x86_64-linux-gnu"}


def key(folder: Path) -> str:
    """The key of all that is known of an op before a build."""
    return describe(folder, compiler=GCC).key


def built_key(folder: Path) -> str:
    """The key of an op's entry, which is built if the cache has none."""
    return helpers.built(folder, folder.parent / "cache").key


@pytest.mark.parametrize("name", ["plus.c", "amount.h", "nested/inner.h"])
def test_every_file_of_the_op_flips_the_key(op: Path, name: str) -> None:
    (op / "nested").mkdir()
    (op / "nested" / "inner.h").write_text("/* inner */\n")
    (op / "amount.h").write_text('#include "nested/inner.h"\n#define AMOUNT 1.0f\n')
    before = built_key(op)
    with open(op / name, "a") as file:
        file.write("\n")
    assert built_key(op) != before


@pytest.mark.parametrize("then", ['#include "tuned.h"', "#define TUNED 1"])
@pytest.mark.parametrize("asked", ["__has_include(", "__has_include ("])
def test_a_header_that_appears_flips_the_key(op: Path, then: str, asked: str) -> None:
    (op / "plus.c").write_text(PLUS + f'#if {asked}"tuned.h")\n{then}\n#endif\n')
    before = built_key(op)
    (op / "tuned.h").write_text("")
    assert built_key(op) != before


@pytest.mark.parametrize(
    "name",
    [
        "opjit.h",
        "opjit_glue.h",
        "opjit_half.h",
        "opjit_shim.h",
        "opjit_runtime.c",
        "opjit_convert.c",
    ],
)
def test_each_header_of_opjit_flips_the_key(
    op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    package = helpers.copy_package(tmp_path / "package")
    places = {folder: package / folder for folder in ("kernels_c", "templates")}
    monkeypatch.setattr(resources, "folder", lambda folder: places[folder])
    before = built_key(op)
    with open(package / "kernels_c" / name, "a") as file:
        file.write("\n")
    assert built_key(op) != before


@pytest.mark.parametrize(
    "name", ["glue.c.in", "kernel.in", "fatbin.c.in", "GLUE_GENERATOR", "FORMAT"]
)
def test_each_glue_template_the_generator_s_and_the_format_s_number_flip_the_key(
    op: Path, name: str
) -> None:
    before = key(op)
    template = resources.template
    with pytest.MonkeyPatch.context() as patch:
        if name.isupper():
            module = build_inputs if name == "FORMAT" else recipe
            patch.setattr(module, name, getattr(module, name) + 1)
        else:
            patch.setattr(
                resources, "template", lambda each: template(each) + "\n" * (each == name)
            )
        recipe.glue_digest.cache_clear()
        changed = key(op)
    recipe.glue_digest.cache_clear()
    assert changed != before == key(op)


def test_what_the_compiler_says_of_itself_enters_the_key(
    op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"#!/bin/sh\n'{helpers.real_compiler()}' \"$@\" 2>&1 | sed 's/^gcc version .*/gcc version 99/'\n"
    other = helpers.program(tmp_path / "cc", text)
    before = describe(op).key
    monkeypatch.setenv("CC", str(other))
    found = toolchain.require_compiler(tmp_path / "notes")
    assert found.version == "gcc version 99"
    assert describe(op).key != before


def test_a_compiler_that_was_replaced_at_its_path_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    notes = tmp_path / "notes"
    monkeypatch.setenv("CC", str(compiler))
    versions = []
    for number in (1, 2):
        text = f"#!/bin/sh\necho 'Target: here'\necho 'gcc version {number}'\n"
        helpers.program(tmp_path / "new", text).replace(compiler)
        versions += [
            toolchain.require_compiler(notes).version,
            toolchain.require_compiler(notes).version,
        ]
    assert versions == ["gcc version 1", "gcc version 1", "gcc version 2", "gcc version 2"]


@pytest.mark.parametrize(
    "note",
    [
        "",
        "{",
        "[]",
        "null",
        '{"stamp": 1}',
        '{"found": {}}',
        "\x00",
        '{"stamp": null, "found": null}',
    ],
)
def test_a_damaged_note_on_a_compiler_is_written_anew(tmp_path: Path, note: str) -> None:
    found = toolchain.require_compiler(tmp_path)
    kept = next(path for path in tmp_path.glob("cc-*") if not path.suffix)
    whole = kept.read_text()
    for text in (note, f"{whole.partition(chr(10))[0]}\n{note}", whole.replace("gcc", "tcc")):
        kept.write_text(text)
        assert toolchain.require_compiler(tmp_path) == found


def test_a_note_on_a_compiler_that_somebody_else_wrote_is_not_believed(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    found = toolchain.require_compiler(tmp_path)
    kept = next(path for path in tmp_path.glob("cc-*") if not path.suffix)
    kept.write_text(kept.read_text().replace(found.machine, "evil"))
    os.chown(kept, 12345, 12345)
    assert toolchain.require_compiler(tmp_path) == found


def test_paths_dates_hosts_and_the_environment_do_not_enter_the_key(
    op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = describe(op).key
    other = write_op(tmp_path / "another user" / "deeper" / "plus")
    for path in other.iterdir():
        os.utime(path, (1, 1))
    monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USER", "nobody")
    monkeypatch.setenv("CFLAGS", "-O0")
    environment = dict(reversed(list(os.environ.items())))
    for name in environment:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert describe(other).key == before


def test_content_counts_and_its_date_does_not(op: Path) -> None:
    before = built_key(op)
    keys = set()
    for amount in range(3):  # of the same size and date
        (op / "amount.h").write_text(f"#define AMOUNT {amount}.0f\n")
        os.utime(op / "amount.h", (1, 1))
        keys.add(built_key(op))
    assert len(keys) == 3
    assert before in keys
    (op / "amount.h").write_text("#define AMOUNT 1.0f\n")
    os.utime(op / "amount.h", (time.time() + 1e6,) * 2)
    assert built_key(op) == before


def test_the_document_holds_no_path_of_the_machine(op: Path, tmp_path: Path) -> None:
    document = read(helpers.built(op, tmp_path / "cache").folder)[0].document
    text = json.dumps(document)
    for part in (str(tmp_path), str(helpers.ROOT), os.path.expanduser("~"), socket.gethostname()):
        assert part not in text
    assert set(document["known"]) == {"plus.c"}
    ours = (
        ".h _convert.c _convert.h _elementwise.c _elementwise.h _glue.h _half.h _runtime.c _shim.h"
    )
    read_by_tools = {"amount.h", *(f"<opjit>/opjit{name}" for name in ours.split())}
    assert read_by_tools <= set(document["inputs"])


def tree(folder: Path, files: dict[str, str]) -> Path:
    """The folder, with files in it."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    "line",
    [
        '#include "a.h"',
        "#include <a.h>",
        '  #  include\t"a.h"',
        '#include"a.h"',
        '#include "a.h" // why',
        '#include "a.h"\r',
        '#import "a.h"',
        '%:include "a.h"',
        '??=include "a.h"',
        '#include /* c */ "a.h"',
        '#inc\\\nlude "a.h"',
        '#include \\\n "a.h"',
    ],
)
@pytest.mark.filterwarnings("ignore::opjit.errors.CompileWarning")
def test_every_spelling_of_an_include_is_seen(tmp_path: Path, line: str) -> None:
    folder = tree(tmp_path / "tree", {"op.c": f"{line}\n", "a.h": ""})
    write_op(
        folder,
        plus_c=PLUS.replace("{\n", "{\n    (void)ANSWER;\n", 1).replace("\n\n", f"\n{line}\n\n", 1),
        a_h="#define ANSWER 42\n",
    )
    if line.startswith("??"):  # gnu11 has no trigraphs
        with pytest.raises(BuildError):
            helpers.built(folder, folder / "cache")
        return
    first = helpers.built(folder, folder / "cache")
    assert helpers.built(folder, folder / "cache") == first
    (folder / "a.h").write_text("#define ANSWER 43\n")
    assert helpers.built(folder, folder / "cache").key != first.key


@pytest.mark.parametrize("way", ["above", "through a linked folder", "linked"])
def test_a_header_elsewhere_is_part_of_the_key_and_is_the_one_that_the_compiler_reads(
    op: Path, tmp_path: Path, way: str
) -> None:
    far = tmp_path / "far" / "amount.h"
    (tmp_path / "far" / "inner").mkdir(parents=True)
    far.write_text("#define AMOUNT 2.0f\n")
    if way == "above":
        (op / "amount.h").write_text('#include "../far/amount.h"\n')
        entry = helpers.built(op, op.parent / "cache")
        assert "../far/amount.h" in read(entry.folder)[0].document["inputs"]
    elif way == "linked":
        (op / "amount.h").unlink()
        (op / "amount.h").symlink_to(far)
    else:
        (op / "link").symlink_to(tmp_path / "far" / "inner")
        # Not the amount.h beside plus.c.
        (op / "plus.c").write_text(PLUS.replace('"amount.h"', '"link/../amount.h"'))
    before = built_key(op)
    far.write_text("#define AMOUNT 3.0f\n")
    assert built_key(op) != before


def test_an_op_in_a_linked_folder_has_the_key_of_the_folder(op: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(op)
    assert built_key(tmp_path / "link") == built_key(op)
    helpers.built(tmp_path / "link", tmp_path / "cache")


BY_A_FUNCTION = "#define TEXT(name) #name\n#include TEXT(amount.h)"


def test_an_include_by_a_macro_s_function_is_seen(op: Path, tmp_path: Path) -> None:
    (op / "plus.c").write_text(PLUS.replace('#include "amount.h"', BY_A_FUNCTION))
    first = helpers.built(op, tmp_path / "cache")
    (op / "amount.h").write_text("#define AMOUNT 7.0f\n")
    second = helpers.built(op, tmp_path / "cache")
    assert first.library.read_bytes() != second.library.read_bytes()


@pytest.mark.parametrize(
    "directive",
    ['".incbin ', '".inc" "bin ', '".include '],
    ids=["incbin", "incbin-in-two", "include"],
)
def test_bytes_that_the_assembler_takes_from_a_file_are_inputs(
    op: Path, tmp_path: Path, directive: str
) -> None:
    (op / "data.bin").write_bytes(b"\n")
    taken = f'__asm__(".section .rodata\\nblob:\\n" {directive}\\"{op}/data.bin\\"\\n.previous");\n'
    (op / "plus.c").write_text(PLUS + taken)
    first = helpers.built(op, tmp_path / "cache")
    assert helpers.built(op, tmp_path / "cache") == first
    (op / "data.bin").write_bytes(b" \n")
    assert helpers.built(op, tmp_path / "cache").key != first.key


def test_a_header_from_the_environment_s_include_path_does_not_slip_in(
    op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (op / "amount.h").rename(tmp_path / "elsewhere" / "amount.h")
    for name in ("CPATH", "C_INCLUDE_PATH"):
        with monkeypatch.context() as patch:
            patch.setenv(name, str(tmp_path / "elsewhere"))
            with pytest.raises(BuildError, match=r"amount\.h"):
                build.build(describe(op), Store(tmp_path / f"cache-{name}"))


def test_a_source_that_cannot_be_read_gives_a_key_that_never_comes_again(
    op: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = os.open
    before = describe(op, compiler=GCC).key

    def refuse(
        path: Any, *args: Any, **kwargs: Any
    ) -> Any:  # root can read everything, so permissions would refuse nothing
        if str(path).endswith("plus.c"):
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    assert len({before, describe(op, compiler=GCC).key, describe(op, compiler=GCC).key}) == 3


def test_an_nvcc_swapped_at_its_path_is_another_key(
    op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    keys = []
    runtimes = []
    for build_version in ("V12.9.86", "V13.0.48", "V13.0.88"):
        fake_nvcc(nvcc, build_version)
        for _ in range(2):
            found = toolchain.require_nvcc(tmp_path / "notes")
            target = targets.named("sm_90", backends.for_device("cuda"), found.version)
            identity = toolchain.identity(toolchain.require_compiler(None), found)
            keys.append(describe(op, target, compiler=identity).key)
            runtimes.append(target.folder)
    assert len(set(keys)) == 3
    assert runtimes == [f"sm_90.cuda12.{machine()}"] * 2 + [f"sm_90.cuda13.{machine()}"] * 4


@pytest.mark.nvcc
def test_a_toolkit_by_a_link_and_by_its_real_path_gives_one_key(
    op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = toolchain.require_nvcc(None)
    (tmp_path / "cuda").symlink_to(real.root)
    (tmp_path / "bin").symlink_to(Path(real.root) / "bin")
    target = helpers.cuda_target("sm_90")
    keys = set()
    for home, path in (
        (real.root, None),
        (str(tmp_path / "cuda"), None),
        (None, f"{tmp_path}/bin"),
        (None, f"{real.root}/bin"),
    ):
        with monkeypatch.context() as patched:
            for name in ("CUDA_HOME", "CUDA_PATH"):
                patched.delenv(name, raising=False)
            if home:
                patched.setenv("CUDA_HOME", home)
            if path:
                patched.setenv("PATH", f"{path}{os.pathsep}{os.environ['PATH']}")
            assert toolchain.require_nvcc(None).root == real.root
            keys.add(describe(op, target).key)
    assert len(keys) == 1


def test_a_compiler_found_by_another_path_gives_one_key(
    op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gcc").symlink_to(helpers.real_compiler())
    keys = set()
    real = os.path.dirname(helpers.real_compiler())
    parts = os.environ["PATH"].split(os.pathsep)
    for path in ([real, *parts], [str(tmp_path / "bin"), *parts], [real, *reversed(parts)]):
        with monkeypatch.context() as patched:
            patched.setenv("PATH", os.pathsep.join(path))
            found = toolchain.require_compiler(tmp_path / "notes")
            keys.add(describe(op, compiler=toolchain.identity(found, None)).key)
    assert len(keys) == 1


def test_each_field_of_a_recipe_flips_the_key(op: Path, tmp_path: Path) -> None:
    cuda = targets.named("sm_90", backends.for_device("cuda"), "13.0")
    recipe = describe(
        op,
        cuda,
        compiler={"cc.version": "gcc version 0", "cc.machine": "here", "nvcc.build": "V13.0.0"},
    )
    given = recipe.flags
    flags = {
        "c": given._replace(c=(*given.c, "-more")),
        "cuda": given._replace(cuda=(*given.cuda, "-more")),
        "link": given._replace(link=(*given.link, "-more")),
        "stubs": given._replace(stubs=(*given.stubs, "more")),
        "sources": given._replace(sources=(str(op / "more.cu"),)),
        "debug": given._replace(debug=True),
        "device": given._replace(device=("-more",)),
    }
    # Follows from the arch; its files are inputs; are in `link`, by name.
    assert flags.keys() == set(Flags._fields) - {"needed", "include", "cuda_link", "shared"}
    changed: dict[str, list[Recipe]] = {
        "schema": [replace(recipe, schema=schema.parse("keytest::plus(Tensor y) -> Tensor"))],
        "target": [
            replace(recipe, target=cuda._replace(backend=helpers.cpu())),
            replace(recipe, target=cuda._replace(arch="sm_80")),
            replace(recipe, target=cuda._replace(runtime="cuda12")),
        ],
        "sources": [replace(recipe, sources=(str(op / "other.cu"),))],
        "known": [replace(recipe, known={name: "0" * 64}) for name in ("plus.cu", "more.cu")],
        "flags": [replace(recipe, flags=more) for more in flags.values()],
        "toolchain": [
            replace(recipe, toolchain={**(recipe.toolchain or {}), name: "?"})
            for name in [*(recipe.toolchain or {}), "ld"]
        ],
    }
    # Names are parts of other fields, texts are in `known`; the rest is for messages, and for other keys.
    apart = {"name", "texts", "places", "doubt", "label", "place", "others", "only_listed"}
    assert changed.keys() == {field.name for field in fields(Recipe)} - apart
    every = [recipe, *(one for several in changed.values() for one in several)]
    assert len({one.key for one in every}) == len(every)
