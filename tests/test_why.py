"""`opjit why`: whether a request hits, where, and which input of a build is another than the nearest entry's."""

import json
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import opjit
from opjit import cli, request, why
from opjit.backends import targets
from opjit.recipe import build_inputs, recipe
from opjit.recipe.document import document_key
from opjit.recipe.recipe import Recipe
from opjit.store import manifest
from opjit.store.entry import Entry
from opjit.store.layers import FOLDER as LAYER
from opjit.store.store import Store
from opjit.why import Difference, Explanation
from tests import helpers
from tests.helpers import LEVELS, PLUS, built, describe

NAMESPACE = "whytest"
GCC_13 = {"cc.version": "gcc version 13.2.0", "cc.machine": "x86_64-linux-gnu"}


@pytest.fixture
def cache(built_once: tuple[Path, Entry], tmp_path: Path) -> Path:
    """A cache that holds the entry, to be changed."""
    return Path(shutil.copytree(built_once[0].parent / "cache", tmp_path / "cache"))


def explained(wanted: Recipe, built_once: tuple[Path, Entry]) -> list[Difference]:
    """How a recipe differs from the entry that there is."""
    found = why.compare(wanted, Store(built_once[0].parent / "cache"))
    assert found.against == built_once[1].folder
    assert found.key != built_once[1].key
    return list(found.differences)


def edit(name: str, text: str) -> Callable[[Path], Recipe]:
    def change(folder: Path) -> Recipe:
        (folder / name).write_text(text)
        return describe(folder)

    return change


def with_flags(
    kind: str, change: Callable[[tuple[str, ...]], tuple[str, ...]]
) -> Callable[[Path], Recipe]:
    def changed(folder: Path) -> Recipe:
        wanted = describe(folder)
        replaced: dict[str, Any] = {kind: change(getattr(wanted.flags, kind))}
        return replace(wanted, flags=wanted.flags._replace(**replaced))

    return changed


def without_header(folder: Path) -> Recipe:
    (folder / "amount.h").unlink()
    return describe(folder)


FLIPS: dict[str, tuple[Callable[[Path], Recipe], list[tuple[str, str]]]] = {
    "source-grown": (edit("plus.c", PLUS + "// one\n// two\n"), [("source", "plus.c changed")]),
    "source-same-length": (
        edit("plus.c", PLUS.replace("contiguous tensor", "dense tensor")),
        [("source", "plus.c changed")],
    ),
    "header": (edit("amount.h", "#define AMOUNT 2.0f\n"), [("header", "amount.h changed")]),
    "header-gone": (without_header, [("header", "amount.h is gone")]),
    "header-before": (
        lambda folder: edit("opjit.h", "")(folder),
        [("header", "opjit.h has appeared")],
    ),
    "flag-added": (with_flags("c", lambda flags: (*flags, "-DX=1")), [("flag", "-DX=1 is new")]),
    "flag-removed": (
        with_flags("c", lambda flags: tuple(f for f in flags if f != "-O3")),
        [("flag", "-O3 was removed")],
    ),
    "flag-instead": (
        with_flags("c", lambda flags: tuple("-O2" if f == "-O3" else f for f in flags)),
        [("flag", "-O2 is new"), ("flag", "-O3 was removed")],
    ),
    "linker-flag": (
        with_flags("link", lambda flags: (*flags, *flags)),
        [("linker flag", "-lm is new")],
    ),
    "flags-moved": (
        with_flags("c", lambda flags: (flags[-1], *flags[:-1])),
        [("flag", "the same in a different order: …")],
    ),
    "nvcc-flag": (with_flags("cuda", lambda flags: ("-O1",)), [("nvcc flag", "-O1 is new")]),
    "schema": (
        lambda folder: describe(folder, text="keytest::plus(Tensor x, int n=1) -> Tensor"),
        [
            (
                "schema",
                "keytest::plus(Tensor x, int n=1) -> Tensor, keytest::plus(Tensor x) -> Tensor before",
            )
        ],
    ),
    "nvcc": (
        lambda folder: replace(
            describe(folder),
            toolchain={**(describe(folder).toolchain or {}), "nvcc.build": "V13.0.88"},
        ),
        [("nvcc", "V13.0.88, none before")],
    ),
}


@pytest.mark.parametrize("flip", FLIPS)
def test_an_input_that_changed_is_named_and_nothing_else(
    flip: str, op: Path, built_once: tuple[Path, Entry]
) -> None:
    change, expected = FLIPS[flip]
    assert [
        (what, re.sub("order: .*", "order: …", text))
        for what, text in explained(change(op), built_once)
    ] == expected


def test_another_compiler_is_named_with_both_versions(
    op: Path, built_once: tuple[Path, Entry]
) -> None:
    known = describe(op).toolchain
    assert known is not None
    [version] = explained(
        describe(op, compiler={**known, "cc.version": GCC_13["cc.version"]}), built_once
    )
    assert version == ("compiler", f"gcc version 13.2.0, {known['cc.version']} before")
    [machine] = explained(
        describe(op, compiler={**known, "cc.machine": "riscv64-linux-gnu"}), built_once
    )
    assert machine == ("compiler's target", f"riscv64-linux-gnu, {known['cc.machine']} before")


def test_another_template_of_the_glue_and_another_format_are_named(
    op: Path, built_once: tuple[Path, Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "glue_digest", lambda: "f" * 64)
    assert explained(describe(op), built_once) == [("opjit", "the glue's template changed")]
    monkeypatch.setattr(build_inputs, "FORMAT", 7)
    assert explained(describe(op), built_once)[1:] == [("format", "7, 5 before")]


def test_no_part_of_a_key_can_change_without_being_named(built_once: tuple[Path, Entry]) -> None:
    wanted = describe(built_once[0])
    described = manifest.parse((built_once[1].folder / manifest.NAME).read_bytes())
    assert why.differences(described, wanted) == ()
    document = json.dumps(described.document)
    for name in described.document.keys() - {"inputs", "absent"}:
        for other in ("else", None, 55, [], {}, ["x"], {"x": "y"}):
            changed = {**json.loads(document), name: other}
            assert why.differences(described._replace(document=changed), wanted), (name, other)
        missing = {known: value for known, value in json.loads(document).items() if known != name}
        assert why.differences(described._replace(document=missing), wanted), name
    assert why.differences(
        described._replace(document={**json.loads(document), "later": 1}), wanted
    ) == (("later", "none, 1 before"),)


def test_several_differences_come_in_the_order_of_their_likelihood(
    op: Path, built_once: tuple[Path, Entry]
) -> None:
    (op / "amount.h").write_text("#define AMOUNT 3.0f\n")
    (op / "plus.c").write_text(PLUS + "\n")
    wanted = describe(op, text="keytest::plus(Tensor x, int n=1) -> Tensor", compiler=GCC_13)
    wanted = replace(wanted, flags=wanted.flags._replace(c=(*wanted.flags.c, "-DY")))
    assert [difference.what for difference in explained(wanted, built_once)] == [
        "source",
        "header",
        "schema",
        "flag",
        "compiler",
        "compiler's programs",
    ]


def test_the_nearest_entry_is_the_one_with_the_fewest_differences(
    op: Path, cache: Path, built_once: tuple[Path, Entry]
) -> None:
    (op / "amount.h").write_text("#define AMOUNT 4.0f\n")
    (op / "plus.c").write_text(PLUS + "\n")
    second = built(op, cache)
    (op / "plus.c").write_text(PLUS + "\n\n")
    assert why.compare(describe(op), Store(cache)).against == second.folder
    (op / "plus.c").write_text(PLUS)
    (op / "amount.h").write_text("#define AMOUNT 5.0f\n")
    assert why.compare(describe(op), Store(cache)).against == cache / built_once[
        1
    ].folder.relative_to(built_once[0].parent / "cache")


def test_what_was_never_built_is_said(op: Path, cache: Path) -> None:
    arch = next(arch for arch in LEVELS if arch != targets.here(helpers.cpu()).arch)
    found = why.compare(describe(op, targets.named(arch)), Store(cache))
    assert found.reason == f"keytest::plus for cpu {arch} was never built"
    assert str(found).endswith(f"\n  never built for cpu {arch}")
    assert (found.against, found.differences) == (None, ())


DAMAGES: dict[str, Callable[[Path], object]] = {
    "library-cut": lambda folder: (folder / "keytest.plus.so").write_bytes(b""),
    "manifest-cut": lambda folder: (folder / manifest.NAME).write_bytes(b"{"),
    "library-writable-by-others": lambda folder: (folder / "keytest.plus.so").chmod(0o666),
    "of-another-format": lambda folder: (folder / manifest.NAME).write_text(
        json.dumps({**json.loads((folder / manifest.NAME).read_bytes()), "format": 99})
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_entry_that_is_not_used_is_named_with_the_reason_that_the_warning_gives(
    op: Path, cache: Path, damage: str
) -> None:
    [folder] = helpers.entries(cache)
    DAMAGES[damage](folder)
    found = why.compare(describe(op), Store(cache))
    with helpers.cache_warnings() as texts:
        assert helpers.found(Store(cache), describe(op)) is None
    [(named, reason)] = found.unusable
    assert named == folder
    if damage != "of-another-format":  # of another opjit, which may share the store
        assert f"{folder} is not used: {reason}" in texts[0]
    assert f"{folder}: {reason}" in str(found)
    assert reason in found.reason


def test_an_unusable_entry_and_a_change_are_both_told(op: Path, cache: Path) -> None:
    (op / "amount.h").write_text("#define AMOUNT 6.0f\n")
    second = built(op, cache)
    second.library.chmod(0o666)
    (op / "amount.h").write_text("#define AMOUNT 7.0f\n")
    found = why.compare(describe(op), Store(cache))
    assert [folder for folder, _ in found.unusable] == [second.folder]
    assert [difference.what for difference in found.differences] == ["header"]
    assert "can be written by other users" in str(found)
    assert "amount.h changed" in str(found)


@pytest.fixture
def declared(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> opjit.Op:
    """An op that this process declares, with a folder of its own, and an empty cache."""
    return helpers.declared(NAMESPACE, tmp_path / "plus", monkeypatch)


def build_it(op: opjit.Op) -> Entry:
    return request.entry(op, targets.here(helpers.cpu()))


def test_a_hit_names_its_folder_and_whose_that_is(
    declared: opjit.Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = build_it(declared)
    found = opjit.explain(declared.qualified, "cpu")
    assert (found.found, found.place, found.key, found.differences) == (
        entry.folder,
        "the cache",
        entry.key,
        (),
    )
    assert found.reason.endswith(f"is built already: {entry.folder}")
    start = f"{NAMESPACE}::plus for {targets.here(helpers.cpu())}"
    assert str(found) == f"{start}: a hit; a request would use it\n  in the cache: {entry.folder}"
    monkeypatch.setenv("OPJIT_LAYERS", str(tmp_path / "cache"))
    monkeypatch.setenv("OPJIT_CACHE", str(tmp_path / "empty"))
    assert opjit.explain(declared, "cpu").place == f"the layer {tmp_path / 'cache'}"
    monkeypatch.delenv("OPJIT_LAYERS")
    shutil.copytree(tmp_path / "cache", declared.folder / LAYER)
    beside = opjit.explain(declared, "cpu")
    assert beside.place == "the binaries next to its source"
    assert beside.found == declared.folder / LAYER / entry.folder.relative_to(tmp_path / "cache")


def test_what_does_not_matter_for_a_shipped_binary_is_not_named(
    declared: opjit.Op, tmp_path: Path
) -> None:
    build_it(declared)
    shutil.move(tmp_path / "cache", declared.folder / LAYER)
    [folder] = helpers.entries(declared.folder / LAYER)
    described = manifest.parse((folder / manifest.NAME).read_bytes())
    other = {**described.document, "glue": "0" * 64, "toolchain": GCC_13}
    changed = described._replace(document=other, key=document_key(other))
    (folder / manifest.NAME).write_bytes(changed.dump())
    folder.rename(folder.with_name(changed.key))
    assert opjit.explain(declared, "cpu").place == "the binaries next to its source"
    (declared.folder / "amount.h").write_text("#define AMOUNT 8.0f\n")
    missed = opjit.explain(declared, "cpu")
    assert missed.found is None
    assert missed.differences == (("header", "amount.h changed"),)


def test_a_miss_says_what_a_request_would_do(
    declared: opjit.Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert opjit.explain(declared, "cpu").outcome == "a request would build it"
    monkeypatch.setenv("OPJIT_OFFLINE", "1")
    assert "OPJIT_OFFLINE" in opjit.explain(declared, "cpu").outcome
    monkeypatch.delenv("OPJIT_OFFLINE")
    monkeypatch.setenv("OPJIT_REMOTE", "file:///nowhere")
    assert (
        opjit.explain(declared, "cpu").outcome
        == "a request would query the remote, and without an entry there build it"
    )
    monkeypatch.delenv("OPJIT_REMOTE")
    monkeypatch.setenv("CC", str(tmp_path / "nothing"))
    found = opjit.explain(declared, "cpu")
    assert found.key is None
    assert "no compiler works here" in found.outcome
    monkeypatch.delenv("CC")
    build_it(declared)
    monkeypatch.setenv("CC", str(tmp_path / "nothing"))
    hit = opjit.explain(declared, "cpu")
    assert hit.found is not None
    assert "any compiler's binary matches" in hit.outcome
    (declared.folder / "amount.h").write_text("#define AMOUNT 9.0f\n")
    assert opjit.explain(declared, "cpu").differences == (("header", "amount.h changed"),)


def test_explaining_builds_nothing_warns_of_nothing_and_writes_no_entry(
    declared: opjit.Op, tmp_path: Path
) -> None:
    entry = build_it(declared)
    (entry.folder / manifest.NAME).write_bytes(b"?")
    before = helpers.snapshot(tmp_path / "cache")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = opjit.explain(declared, "cpu")
    assert found.found is None
    assert len(found.unusable) == 1
    assert helpers.snapshot(tmp_path / "cache") == before


def test_the_command_s_text_and_json_say_the_same_and_an_error_is_a_sentence(
    declared: opjit.Op,
) -> None:
    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli.main, ["why", declared.qualified, "--device", "cpu", *words])
        return done.exit_code, done.stdout or done.stderr

    def fields() -> Any:
        [only] = json.loads(run("--json")[1])
        return only

    entry = build_it(declared)
    arch = entry.folder.parent.name[:-21]
    assert fields() == {
        "op": declared.qualified,
        "target": f"cpu {arch}",
        "arch": arch,
        "key": entry.key,
        "state": "hit",
        "found": str(entry.folder),
        "place": "the cache",
        "against": None,
        "differences": [],
        "unusable": [],
        "outcome": "a request would use it",
        "compiler": "",
        "uncached": "",
        "reason": opjit.explain(declared, "cpu").reason,
    }
    (declared.folder / "amount.h").write_text("#define AMOUNT 12.0f\n\n")
    code, told = run()
    assert code == 0
    assert "a miss; a request would build it" in told
    assert "header: amount.h changed" in told
    miss = fields()
    assert (miss["state"], miss["found"], miss["against"]) == ("miss", None, str(entry.folder))
    assert miss["differences"] == [{"what": "header", "text": "amount.h changed"}]
    (entry.folder / manifest.NAME).write_bytes(b"{")
    [unusable] = fields()["unusable"]
    assert unusable["folder"] == str(entry.folder)
    assert "not JSON" in unusable["reason"]
    code, told = run("--arch", "sm_1", "--json")
    assert (code, helpers.without_pointer(told).count("\n")) == (2, 1)
    assert told.startswith("Error: unknown arch")


def test_an_explanation_fits_a_screen_whatever_changed(op: Path, tmp_path: Path) -> None:
    for number in range(60):
        (op / f"h{number}.h").write_text("\n")
    (op / "amount.h").write_text(
        "".join(f'#include "h{number}.h"\n' for number in range(60)) + "#define AMOUNT 1.0f\n"
    )
    built(op, tmp_path / "cache")
    for number in range(60):
        (op / f"h{number}.h").write_text("\n\n")
    found = why.compare(describe(op), Store(tmp_path / "cache"))
    assert len(found.differences) == 60
    assert len(str(found).splitlines()) <= 24
    assert "and 48 more" in str(found)
    assert "\n" not in found.reason
    everything = Explanation(
        "a::b",
        "cpu x",
        "k",
        "would",
        against=tmp_path,
        differences=found.differences,
        unusable=((tmp_path, "why"),) * 60,
    )
    assert len(str(everything).splitlines()) <= 24


@pytest.mark.nvcc
def test_a_cuda_op_s_nvcc_flags_and_version_are_named(op: Path, tmp_path: Path) -> None:
    target = helpers.cuda_target("sm_90")
    entry = built(op, tmp_path / "cuda-cache", target)
    wanted = describe(op, target)
    assert wanted.toolchain is not None
    name, version = list(wanted.toolchain.items())[-1]  # NVRTC where torch brings it, else nvcc
    changed = replace(
        wanted,
        toolchain={**wanted.toolchain, name: "V99.0"},
        others=(),
        flags=wanted.flags._replace(
            cuda=tuple(flag for flag in wanted.flags.cuda if flag != "-O1")
        ),
    )
    found = why.compare(changed, Store(tmp_path / "cuda-cache"))
    assert found.against == entry.folder
    assert found.differences == (
        ("nvcc flag", "-O1 was removed"),
        (why._NAMES[name], f"V99.0, {version} before"),
    )
