"""Folders of ops: added by a program, named by OPJIT_PATH, or brought by installed packages."""

import json
import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import opjit
from opjit import processes
from opjit.catalog import arguments, registry
from opjit.declare import fake_kernel
from opjit.errors import DeclarationError, UnknownOp
from opjit.operators import autograd
from tests.helpers import PLUS, fresh, install_package, op_py, until, write_op


def write(folder: Path, name: str) -> Path:
    """A folder of an op that adds one."""
    short = name.rpartition("::")[2]
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "op.py").write_text(op_py(f"{name}(Tensor x) -> Tensor"))
    (folder / "op.py").chmod(0o644)
    (folder / f"{short}.c").write_text(
        PLUS.replace('#include "amount.h"\n', "")
        .replace("plus_cpu", f"{short}_cpu")
        .replace("AMOUNT", "1")
    )
    return folder


def write_slow(folder: Path) -> Path:
    """The same, whose op.py takes half a second until the op is whole."""
    with (write(folder, "pathtest::slowly") / "op.py").open("a") as file:
        file.write(
            "\n\nimport time\ntime.sleep(0.5)\n\n\n@slowly.backward\ndef backward(ctx, grad):\n    return grad\n"
        )
    return folder


def names(ops: list[opjit.Op]) -> list[str]:
    return [op.qualified for op in ops]


def test_an_op_py_saved_twice_in_a_moment_is_read_as_it_is(tmp_path: Path) -> None:
    """Python's byte code is known by a whole second and a size."""
    folder = write(tmp_path / "saved", "pathtest::saved")
    text = (folder / "op.py").read_text()
    for value in range(3):
        (folder / "op.py").write_text(f"{text}\nNUMBER = {value}\n")
        os.utime(folder / "op.py", (1e9, 1e9))
        code = f"import opjit, sys\nopjit.add_path({str(folder)!r})\nprint(sys.modules['opjit_ops_saved'].NUMBER)"
        assert fresh(code, {"PYTHONDONTWRITEBYTECODE": None}).stdout == f"{value}\n"


def test_an_op_s_folder_or_a_folder_of_them_is_added_once(tmp_path: Path) -> None:
    write(tmp_path / "one", "pathtest::one")
    write(tmp_path / "two", "pathtest::two")
    (tmp_path / "common").mkdir()  # headers, say
    assert names(opjit.add_path(tmp_path / "one")) == ["pathtest::one"]
    known = registry.find("pathtest::one")
    assert names(opjit.add_path(str(tmp_path))) == ["pathtest::one", "pathtest::two"]
    assert registry.find("pathtest::one") is known
    assert opjit.get("pathtest::two", "cpu")(torch.ones(2)).tolist() == [2.0, 2.0]


def test_a_folder_is_added_by_a_relative_path_and_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "ops" / "linked", "pathtest::linked")
    (tmp_path / "link").symlink_to("ops")
    monkeypatch.chdir(tmp_path)
    [op] = opjit.add_path("ops")
    assert opjit.add_path("link") == [op]


def test_two_ops_of_one_name_are_refused_with_both_places(tmp_path: Path) -> None:
    first, second = (write(tmp_path / place / "same", "pathtest::same") for place in ("a", "b"))
    opjit.add_path(first)
    with pytest.raises(DeclarationError, match="two ops are named pathtest::same") as caught:
        opjit.add_path(second)
    assert str(first) in str(caught.value)
    assert str(second) in str(caught.value)
    assert registry.find("pathtest::same").folder == first


@pytest.mark.parametrize("made", ["nothing", "a folder", "a file", "an op.py without an op", "C++"])
def test_a_folder_without_an_op_is_refused_in_a_sentence(tmp_path: Path, made: str) -> None:
    place = tmp_path / "place"
    if made == "a file":
        place.touch()
    elif made != "nothing":
        place.mkdir()
        (place / ("scale.cpp" if made == "C++" else "scale.c")).touch()
    if made == "an op.py without an op":
        (place / "op.py").write_text("import opjit\n")
    expected = {
        "a folder": r"no op is declared in \S+place: expected op\.py in it",
        "an op.py without an op": r"op\.py declares no op",
        "a file": r"expected the directory of an op, got the file (\S+)/place; pass \1$",
        "C++": r'expected op\.py in it .*; scale\.cpp is C\+\+: build it with opjit\.load\("scale", \["\S+/scale\.cpp"\]\)',
    }
    with pytest.raises(
        DeclarationError, match=expected.get(made, r"there is no directory \S+place")
    ):
        opjit.add_path(place)


def test_what_an_op_py_declared_before_it_raised_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    folder = write(tmp_path / "broken", "pathtest::broken")
    text = (folder / "op.py").read_text()
    (tmp_path / "whole.py").write_text(op_py("pathtest::whole(Tensor x) -> Tensor"))
    (folder / "op.py").write_text(text + "\n\nimport whole\n\nraise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        opjit.add_path(folder)
    assert registry.declared("pathtest::broken") is None
    assert "opjit_ops_broken" not in sys.modules
    assert torch._C._jit_get_operation("pathtest::broken")[0] is None
    assert registry.declared("pathtest::whole") is not None, "its module can be imported only once"
    (folder / "op.py").write_text(text)
    assert names(opjit.add_path(folder)) == ["pathtest::broken"]
    assert opjit.get("pathtest::broken", "cpu")(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch.library.Library, "impl"),
        (fake_kernel, "register"),
        (autograd, "bind_backward"),
        (registry, "add"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_interrupted_declaration_leaves_nothing_and_can_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    folder = write(tmp_path / "stopped", f"pathtest::stopped_{name}")
    real = getattr(owner, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            opjit.add_path(folder)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(
            lambda: [
                lock.acquire(blocking=False) and lock.release() is None
                for lock in (processes.reading, processes.declaring)
            ]
        ).result() == [True, True]
    assert not hasattr(torch.ops.pathtest, f"stopped_{name}")
    [op] = opjit.add_path(folder)
    assert getattr(torch.ops.pathtest, f"stopped_{name}").default is op.overload
    assert op.overload(torch.empty(2, device="meta")).shape == (2,)


def test_an_op_py_finds_its_own_ops_and_those_of_the_op_py_that_added_it(tmp_path: Path) -> None:
    inner = write(tmp_path / "inner", "pathtest::inner")
    outer = write(tmp_path / "outer", "pathtest::outer")
    look = "\n\nfrom opjit.catalog import registry\n\nassert [registry.find(name) for name in {!r}] == [{}]\n"
    with (inner / "op.py").open("a") as file:
        file.write(
            look.format(
                ["pathtest::outer", "pathtest::inner"],
                "registry.declared('pathtest::outer'), inner",
            )
        )
    with (outer / "op.py").open("a") as file:
        file.write(
            f"\n\nopjit.add_path({os.fspath(inner)!r})\n"
            + look.format(["pathtest::outer"], "outer")
        )
    assert names(opjit.add_path(outer)) == ["pathtest::outer"]
    assert registry.find("pathtest::inner").folder == inner


def test_no_thread_gets_an_op_whose_declaration_is_half_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_slow(tmp_path / "ops" / "slowly")
    monkeypatch.setenv("OPJIT_PATH", str(tmp_path / "ops"))
    with ThreadPoolExecutor(1) as other:
        first = other.submit(registry.find, "pathtest::slowly")
        until(lambda: torch._C._jit_get_operation("pathtest::slowly")[0] is not None)
        assert not first.done()
        assert registry.find("pathtest::slowly").declaration.backward is not None
        assert first.result() is registry.find("pathtest::slowly")


def test_a_child_forked_while_an_op_py_runs_has_its_ops_whole(tmp_path: Path) -> None:
    folder = write_slow(tmp_path / "slowly")
    fresh(f"""
        import os, threading, time
        import torch, opjit
        thread = threading.Thread(target=opjit.add_path, args=({os.fspath(folder)!r},))
        thread.start()
        while torch._C._jit_get_operation("pathtest::slowly")[0] is None:
            time.sleep(0.001)
        child = os.fork()
        if child == 0:
            found = opjit.registry.declared("pathtest::slowly")
            os._exit(found is None or found.declaration.backward is None)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        thread.join()
        """)


def test_an_op_py_may_import_a_module_that_another_thread_is_importing_and_that_declares_an_op(
    tmp_path: Path,
) -> None:
    folder = write(tmp_path / "importer", "pathtest::importer")
    (tmp_path / "importing").mkdir()
    (tmp_path / "importing" / "declares.py").write_text(
        "import time\ntime.sleep(0.5)\n" + op_py("pathtest::declares(Tensor x) -> Tensor")
    )
    with (folder / "op.py").open("a") as file:
        file.write("\n\nimport declares\n")
    fresh(f"""
        import importlib, sys, threading, time
        import torch, opjit
        sys.path.insert(0, {os.fspath(tmp_path / "importing")!r})
        thread = threading.Thread(target=importlib.import_module, args=("declares",), daemon=True)
        thread.start()
        while "declares" not in sys.modules:
            time.sleep(0.001)
        adding = threading.Thread(target=opjit.add_path, args=({os.fspath(folder)!r},), daemon=True)
        adding.start()
        adding.join(60)
        assert not adding.is_alive()
        assert opjit.registry.find("pathtest::declares") and opjit.registry.find("pathtest::importer")
        """)


def test_the_environment_s_folders_are_read_when_an_op_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = write(tmp_path / "a" / "env_one", "pathtest::env_one")
    two = write(tmp_path / "env_two", "pathtest::env_two")
    monkeypatch.setenv("OPJIT_PATH", os.pathsep.join(["", str(one.parent), str(two), ""]))
    opjit.get("allreduce", "cpu")
    assert registry.declared("pathtest::env_one") is None
    assert opjit.get("pathtest::env_one", "cpu")(torch.ones(1)).tolist() == [2.0]
    assert registry.declared("pathtest::env_two") is not None


def test_neither_an_import_nor_a_known_op_looks_at_the_environment_s_folders(
    tmp_path: Path,
) -> None:
    write(tmp_path / "unread", "pathtest::unread")
    code = f"""
        import json, sys
        import torch
        seen = []
        sys.addaudithook(lambda event, arguments: seen.append(event + str(arguments)) if event != "subprocess.Popen" else None)
        import opjit
        torch.ops.opjit.allreduce(torch.ones(3))
        opjit.get("allreduce", "cpu")
        print(json.dumps([line for line in seen if {str(tmp_path)!r} in line]))
        print(opjit.get("pathtest::unread", "cpu"))
        """
    done = fresh(code, {"OPJIT_PATH": str(tmp_path)})
    assert json.loads(done.stdout.splitlines()[0]) == []
    assert "pathtest.unread" in done.stdout


def test_two_folders_of_one_name_are_two_modules(tmp_path: Path) -> None:
    """What looks things up by the name of their module finds each folder's own."""
    for place in ("a", "b"):
        with (write(tmp_path / place / "shared", f"pathtest::shared_{place}") / "op.py").open(
            "a"
        ) as file:
            file.write(f"\n\nclass Options:\n    place = {place!r}\n")
    code = """
        import pickle, sys
        import torch, opjit
        for place in ("a", "b"):
            module = sys.modules[opjit.registry.find(f"pathtest::shared_{place}").fake.__module__]
            assert type(pickle.loads(pickle.dumps(module.Options()))) is module.Options and module.Options.place == place
            print(module.__name__)
        """
    done = fresh(
        code, {"OPJIT_PATH": os.pathsep.join(str(tmp_path / place) for place in ("a", "b"))}
    )
    first, second = done.stdout.split()
    assert (first, second.rpartition("_")[0]) == ("opjit_ops_shared", "opjit_ops_shared")


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("ops", "absolute path"),
        ("{}/no", "there is no directory"),
        ("{}/empty", "no op is declared"),
    ],
)
def test_a_folder_of_the_environment_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str, reason: str
) -> None:
    write(tmp_path / "ops" / "flawed", "pathtest::flawed")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    bad = bad.format(tmp_path)
    monkeypatch.setenv("OPJIT_PATH", bad)
    for _ in range(2):
        with pytest.raises(DeclarationError, match=f"OPJIT_PATH names '{bad}'.*{reason}"):
            opjit.get("pathtest::flawed", "cpu")
    assert registry.declared("pathtest::flawed") is None


def test_the_command_lists_them_also_as_json_without_what_an_op_py_prints(tmp_path: Path) -> None:
    folder = write(tmp_path / "listed", "pathtest::listed")
    with (folder / "op.py").open("a") as file:
        file.write("print('a remark')\n")
    code = "from opjit.cli import main\nfor more in (['--json'], []): main(['list', *more], standalone_mode=False)"
    done = fresh(code, {"OPJIT_PATH": str(tmp_path)})
    listed, end = json.JSONDecoder().raw_decode(done.stdout)
    assert {
        "op": "pathtest::listed",
        "schema": "pathtest::listed(Tensor x) -> Tensor",
        "backends": ["cpu"],
        "folder": str(folder),
    } in listed
    assert "pathtest::listed  [cpu]  listed(Tensor x) -> Tensor" in done.stdout[end:]
    assert "a remark" in done.stderr


@pytest.mark.parametrize("way", ["the environment", "the command line"])
@pytest.mark.parametrize(
    "name",
    ["the folder", "the folder around it", "op.py", "a kernel", "byte code", "a link's target"],
)
def test_a_folder_is_not_run_if_others_can_write_anything_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, way: str
) -> None:
    op = write(tmp_path / "shared" / "planted", "pathtest::planted")
    (op / "__pycache__").mkdir()
    (op / "linked.c").touch()
    (op.parent / "elsewhere.c").touch()
    (op / "link.c").symlink_to("../elsewhere.c")
    writable = {
        "the folder": op,
        "the folder around it": op.parent,
        "op.py": op / "op.py",
        "a kernel": op / "linked.c",
        "byte code": op / "__pycache__",
        "a link's target": op.parent / "elsewhere.c",
    }[name]
    writable.chmod(writable.stat().st_mode | 0o002)
    if way == "the environment":
        monkeypatch.setenv("OPJIT_PATH", str(op))
    with pytest.raises(
        DeclarationError,
        match=rf"opjit refuses to run the op.py files in .*planted: {writable} can be written by other users .*chmod",
    ):
        registry.find("pathtest::planted") if way == "the environment" else arguments.ops(str(op))
    assert registry.declared("pathtest::planted") is None


def test_a_folder_is_named_with_a_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "slashed", "pathtest::slashed")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownOp, match=r"to name the directory slashed, write \./slashed"):
        arguments.ops("slashed")
    assert names(arguments.ops("./slashed")) == ["pathtest::slashed"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_not_run_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In /tmp, where anybody may have made a folder with the name of an op."""
    op = write(tmp_path / "somebodys", "pathtest::somebodys")
    for path in (op, *op.iterdir()):
        os.chown(path, 12345, 12345)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownOp):
        arguments.ops("somebodys")
    with pytest.raises(DeclarationError, match="belongs to user 12345"):
        arguments.ops("./somebodys")
    assert registry.declared("pathtest::somebodys") is None


def test_a_folder_that_python_code_names_is_run_even_if_others_can_write_it(tmp_path: Path) -> None:
    op = write(tmp_path / "shared", "pathtest::shared")
    op.chmod(0o777)
    assert names(opjit.add_path(op)) == ["pathtest::shared"]


def test_unpickling_runs_no_op_py_that_others_can_write(tmp_path: Path) -> None:
    [op] = opjit.add_path(write(tmp_path / "thawed", "pathtest::thawed"))
    pickled = pickle.dumps([op, op.overload])
    registry.remove(op)
    op.folder.chmod(0o777)
    with pytest.raises(
        DeclarationError,
        match=r"opjit refuses to run the op\.py files in .*/thawed: .*can be written by other users",
    ):
        pickle.loads(pickled)
    op.folder.chmod(0o755)
    assert pickle.loads(pickled)[0].qualified == "pathtest::thawed"


def test_an_installed_package_s_ops_are_found_by_name(tmp_path: Path) -> None:
    """A module that declares them, or a package that is a folder of ops; those of other namespaces are not imported."""
    site = tmp_path / "site"
    install_package(
        site,
        "alpha",
        "alphaops = alpha_ops",
        {"alpha_ops/__init__.py": "", "alpha_ops/grow/grow.c": ""},
    )
    (site / "alpha_ops" / "grow" / "op.py").write_text(op_py("alphaops::grow(Tensor x) -> Tensor"))
    install_package(
        site,
        "beta",
        "betaops = beta_ops:declare",
        {
            "beta_ops.py": "import opjit\nfrom pathlib import Path\nprint('beta')\n"
            + op_py("betaops::shrink(Tensor x) -> Tensor")
            + "declare = None\n"
        },
    )
    install_package(
        site, "gamma", "gammaops = gamma_ops", {"gamma_ops.py": "raise OSError('no license')\n"}
    )
    code = """
        import sys, warnings
        import torch, opjit
        from opjit.catalog import registry
        warnings.simplefilter("error")
        opjit.get("allreduce", "cpu")
        assert not {"alpha_ops", "beta_ops", "gamma_ops"} & set(sys.modules)
        print(registry.find("alphaops::grow"))
        assert not {"beta_ops", "gamma_ops"} & set(sys.modules)
        print(registry.find("betaops::shrink"))
        warnings.simplefilter("always")
        for _ in range(2):
            try:
                registry.find("gammaops::has_this")
            except opjit.errors.UnknownOp as error:
                print(error)
        """
    path = os.pathsep.join(
        [str(site), os.environ.get("PYTHONPATH", ""), str(Path(opjit.__file__).parents[1])]
    )
    done = fresh(code, {"PYTHONPATH": path})
    assert (
        "<opjit op alphaops::grow(Tensor x) -> Tensor>\nbeta\n<opjit op betaops::shrink"
        in done.stdout
    )
    assert done.stdout.count("no op named 'gammaops::has_this'") == 2
    assert (
        done.stderr.count(
            "the ops of the entry point gammaops = gamma_ops of gamma are missing: OSError: no license"
        )
        == 1
    )


@pytest.fixture
def path(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = here.with_name("ops")
    write_op(
        folder / "plus",
        op_py="import torch, opjit\n"
        "assert not hasattr(torch.ops.nstest, 'other')  # asks while it is being read\n"
        "@opjit.op('nstest::plus(Tensor x) -> Tensor')\ndef plus(x): return torch.empty_like(x)\n",
    )
    monkeypatch.setenv("OPJIT_PATH", str(folder))
    return folder


@pytest.mark.parametrize(
    "first",
    [
        "torch.ops.nstest.plus",
        "torch.compile(lambda x: torch.ops.nstest.plus(x), fullgraph=True, backend='eager')",
    ],
)
def test_an_op_of_opjit_path_is_found_by_its_name_also_by_a_compiled_function(
    path: Path, first: str
) -> None:
    fresh(f"""
        import torch, opjit
        assert {first}(torch.ones(2)).tolist() == [2, 2]
        assert not hasattr(torch.ops.nstest, "minus") and not hasattr(torch.ops.aten, "no_such_op")
        try:
            torch.ops.nstest.minus
        except AttributeError as error:
            assert "no attribute 'minus'" in str(error), error
    """)


def test_an_op_of_an_installed_package_is_found_by_its_name(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    install_package(site, "nstest", "nstest = nstest_ops", {})
    install_package(
        site,
        "stranger",
        "stranger = stranger_ops",
        {"stranger_ops.py": "raise SystemExit('an entry point of another namespace was loaded')\n"},
    )
    path.rename(site / "nstest_ops")
    (site / "nstest_ops" / "__init__.py").touch()
    monkeypatch.delenv("OPJIT_PATH")
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    fresh("""
        import torch, opjit
        assert torch.ops.nstest.plus(torch.ones(2)).tolist() == [2, 2]
        assert not hasattr(torch.ops.nstest, "minus") and not hasattr(torch.ops.nowhere, "plus")
    """)


def test_a_fault_in_opjit_path_is_the_reason_and_hasattr_is_false(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPJIT_PATH", str(tmp_path / "missing"))
    fresh("""
        import torch, opjit
        assert not hasattr(torch.ops.nstest, "plus")
        try:
            torch.ops.nstest.plus
        except AttributeError as error:
            assert "torch.ops.nstest.plus was not found: OPJIT_PATH names" in str(error), error
    """)


def test_dir_shows_the_public_names() -> None:
    assert dir(opjit) == sorted(opjit.__all__)
    assert all(hasattr(opjit, name) for name in dir(opjit))
