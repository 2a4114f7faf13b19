"""Build and run ops and programs in environments that users have: other compilers, flags, users, Pythons and releases of torch.

    python -m tests.environments [--folder FOLDER] [NAME...]      --list prints the names

Each environment has an empty home. There, a fresh process runs `opjit demo`, builds a C op, a C++ and a CUDA program, and runs `opjit
doctor`. Without names, all environments run that need no other Python or torch. FOLDER keeps virtual environments with these, of up to 6 GB
each. The table is that of .github/CONTRIBUTING.md. The command fails if something fails, gives a warning, or is built another way than by
the chosen compiler with light headers and NVRTC. It compares the CPU time of the op and the programs with the best environment's."""

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 3600.0  # seconds of one environment, which needs one or two minutes of an idle machine
USER = "4321"  # a user id that no account has
NEUTRAL = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "XDG_CACHE_HOME", "PYTHONPATH")
CONDA = "-march=nocona -mtune=haswell -ftree-vectorize -fPIC -fstack-protector-strong -fno-plt -O2 -ffunction-sections -pipe"
CONDA_LINKER = "-Wl,-O2 -Wl,--sort-common -Wl,--as-needed -Wl,-z,relro -Wl,-z,now -Wl,--disable-new-dtags -Wl,--gc-sections"
LIGHT = "light headers"
FAST_CUDA = ("NVRTC", "its CUDA code is emulated")
CPP = "at::Tensor twice(at::Tensor x) { return x + x; }"
CUDA = """__global__ void add(float *x, long n)
{
    if (threadIdx.x < n)
        x[threadIdx.x] += x[threadIdx.x];
}
at::Tensor twice(at::Tensor x)
{
    add<<<1, 256>>>(x.data_ptr<float>(), x.numel());
    return x;
}"""


class Missing(Exception):
    """This machine lacks what an environment needs."""


class Setting(NamedTuple):
    """How a process of an environment is started."""

    variables: Mapping[str, str | None] = {}
    umask: int = 0o022
    before: tuple[str, ...] = ()  # the words before Python's


class Environment(NamedTuple):
    """An environment. `prepare` makes its files in a folder, or raises Missing."""

    title: str
    prepare: Callable[[Path], Setting]
    compiler: str = ""  # the start of the version of the compiler that it must use
    release: tuple[str, str] | None = None  # of Python and torch, if not this process's


class Step(NamedTuple):
    """What a process did: `way` is how it was built, and `problem` what is wrong, or empty."""

    name: str
    way: str
    problem: str
    cpu_seconds: float


class Run(NamedTuple):
    """What an environment did."""

    steps: Sequence[Step]
    problems: Sequence[str]

    @property
    def cpu_seconds(self) -> float:
        return sum(step.cpu_seconds for step in self.steps if step.name in BUILDS)


# What runs in an environment, in its Python.


def demo() -> str:
    command("demo")
    return "ran"


def doctor() -> str:
    found = json.loads(command("doctor", "--json"))
    bad = [
        f"{each['about']}: {each['seen']}"
        for each in found
        if each["state"] in ("problem", "warning")
    ]
    if bad:
        raise AssertionError(f"opjit doctor: {'; '.join(bad)}")
    return "no problem"


def command(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "opjit", *words], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise AssertionError(f"opjit {' '.join(words)}: {done.stdout}{done.stderr}")
    return done.stdout


def c_op() -> str:
    import torch

    import opjit
    from opjit.store.entry import read

    x = torch.arange(1000.0)
    assert torch.equal(opjit.get("tensor_negate", "cpu")(x), -x)
    explained = opjit.explain("tensor_negate", "cpu")
    assert explained.found is not None, explained.reason
    return str(read(explained.found)[0].document["toolchain"]["cc.version"])


def cpp_program() -> str:
    import torch

    import opjit

    module = opjit.load_inline("environment_cpp", CPP, functions="twice")
    assert module.twice(torch.ones(3)).tolist() == [2, 2, 2]
    return headers("environment_cpp")


def cuda_program() -> str:
    import torch

    import opjit

    name = "environment_cuda"
    module = opjit.load_inline(name, "at::Tensor twice(at::Tensor x);", CUDA, functions="twice")
    if torch.version.cuda is None or torch.cuda.is_available():
        device = "cuda" if torch.version.cuda else "cpu"
        assert module.twice(torch.ones(3, device=device)).tolist() == [2, 2, 2]
    return headers(name)


def headers(name: str) -> str:
    """Return the headers and the compiler of the one binary of a program, as `opjit why` shows them."""
    from opjit.cpp_extension.entries import entries
    from opjit.store.store import default_store

    [entry] = entries(name, default_store())
    return entry.headers


BUILDS: dict[str, Callable[[], str]] = {
    "C op": c_op,
    "C++ program": cpp_program,
    "CUDA program": cuda_program,
}
STEPS = {"demo": demo, **BUILDS, "doctor": doctor}


def do(names: Sequence[str]) -> Iterator[Step]:
    """Do steps in this process."""
    import torch

    from opjit.errors import CacheWarning, CompileWarning

    if torch.version.cuda is None:
        os.environ["OPJIT_EMULATE"] = "1"
    os.environ["TORCH_CUDA_ARCH_LIST"] = "9.0"
    for category in (CacheWarning, CompileWarning):
        warnings.simplefilter("error", category)
    for name in names:
        before = cpu_seconds()
        way = problem = ""
        try:
            way = STEPS[name]()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        yield Step(name, way, problem, cpu_seconds() - before)


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


# The environments.


def compilers(version: str, names: tuple[str, str]) -> Environment:
    """Return the environment of a C and a C++ compiler of a version."""
    cc, cxx = (f"{name}-{version}" for name in names)

    def prepare(folder: Path) -> Setting:
        require(cc, cxx)
        return Setting({"CC": cc, "CXX": cxx})

    return Environment(f"{names[0]} {version}", prepare, f"{names[0]} version {version}")


def require(*programs: str) -> None:
    for name in programs:
        if shutil.which(name) is None:
            raise Missing(f"no {name}")


def plain(folder: Path) -> Setting:
    return Setting()


def ccache(folder: Path) -> Setting:
    require("ccache", "gcc", "g++")
    return Setting({"CC": "ccache gcc", "CXX": "ccache g++"})


def ccache_links(folder: Path) -> Setting:
    links = "/usr/lib/ccache"
    require("ccache", f"{links}/gcc", f"{links}/c++")
    return Setting({"PATH": f"{links}:{os.environ['PATH']}"})


def scripts(folder: Path) -> Setting:
    made = {}
    for variable, compiler in (("CC", "gcc"), ("CXX", "g++")):
        require(compiler)
        path = folder / f"my {compiler}"
        path.write_text(f'#!/bin/sh\nexec {shutil.which(compiler)} "$@"\n', encoding="utf-8")
        path.chmod(0o755)
        made[variable] = str(path)
    return Setting(made)


def conda(folder: Path) -> Setting:
    include = folder / "include"
    include.mkdir()
    flags = f"{CONDA} -isystem {include}"
    cpp = f"-fvisibility-inlines-hidden -fmessage-length=0 {flags}"
    return Setting({"CFLAGS": flags, "CXXFLAGS": cpp, "LDFLAGS": CONDA_LINKER})


def group_writes(folder: Path) -> Setting:
    """As on Fedora, whose users each have a group. Another program has made ~/.cache."""
    cache = folder / "home" / ".cache"
    cache.mkdir()
    cache.chmod(0o775)
    return Setting(umask=0o002)


def nameless(folder: Path) -> Setting:
    """As in a container that runs as `--user 4321`."""
    words = ("unshare", "--user", f"--map-user={USER}", f"--map-group={USER}")
    require(words[0])
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        raise Missing("no user namespaces")
    return Setting({"HOME": None, "USER": None, "LOGNAME": None}, before=words)


def no_toolkit(folder: Path) -> Setting:
    """No nvcc is there: a mount hides each one from the processes of the environment alone."""
    path = f"{os.environ['PATH']}:/usr/local/cuda/bin"
    folders = [Path(part) for part in path.split(":")]
    found = sorted(
        {str((part / "nvcc").resolve()) for part in folders if (part / "nvcc").is_file()}
    )
    hide = [f"mount --bind /dev/null {nvcc}" for nvcc in found]
    words = ("unshare", "--map-root-user", "--mount", "sh", "-c")
    if subprocess.run(
        [*words, " && ".join(["true", *hide])], capture_output=True, check=False
    ).returncode:
        raise Missing("no mounts")
    return Setting(before=(*words, " && ".join([*hide, 'exec "$@"']), "sh"))


def virtual_environment(folder: Path, python: str, torch: str) -> Path:
    """Return the Python of a virtual environment in a folder with a release of torch, which pip installs once."""
    where = folder / f"python{python}-torch{torch}"
    made = where / "bin" / "python"
    if not (where / "complete").exists():
        subprocess.run([find_python(python), "-m", "venv", "--clear", where], check=True)
        words = ["-m", "pip", "install", "--quiet", f"torch=={torch}", str(ROOT)]
        subprocess.run([made, *words], check=True)
        (where / "complete").touch()
    return made


def python_of(environment: Environment, folder: Path | None) -> str | Path:
    if environment.release is None:
        return sys.executable
    if folder is None:
        raise Missing("it needs --folder")
    return virtual_environment(folder, *environment.release)


def find_python(version: str) -> str:
    """Return a Python of pyenv or on PATH."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [
        *sorted(pyenv.glob(f"versions/{version}.*/bin/python")),
        shutil.which(f"python{version}"),
    ]
    if found[0] is None:
        raise Missing(f"no python{version}")
    return str(found[0])


ENVIRONMENTS = {
    "plain": Environment("no change", plain),
    "gcc-11": compilers("11", ("gcc", "g++")),
    "gcc-12": compilers("12", ("gcc", "g++")),
    "clang-14": compilers("14", ("clang", "clang++")),
    "clang-19": compilers("19", ("clang", "clang++")),
    "ccache": Environment('`CC="ccache gcc"`', ccache, "gcc version"),
    "ccache-links": Environment("`/usr/lib/ccache` in `PATH`", ccache_links, "gcc version"),
    "script": Environment("`CC` is a script", scripts, "gcc version"),
    "conda": Environment("conda's `CFLAGS` and `LDFLAGS`", conda),
    "umask": Environment("umask 002, `~/.cache` of mode 775", group_writes),
    "nameless": Environment("a user without a name and `HOME`", nameless),
    "no-toolkit": Environment("no Toolkit", no_toolkit),
}
for _release in (("3.10", "2.10.0"), ("3.11", "2.13.0"), ("3.12", "2.15.0"), ("3.13", "2.14.1")):
    _name = "python-{}-torch-{}".format(*_release)
    _title = "Python {}, torch {}".format(*_release)
    ENVIRONMENTS[_name] = Environment(_title, plain, release=_release)
    ENVIRONMENTS[f"{_name}-no-toolkit"] = Environment(
        f"{_title}, no Toolkit", no_toolkit, release=_release
    )


# Runs, and their table.


def run(
    environment: Environment,
    python: str | Path = sys.executable,
    steps: Sequence[str] = tuple(STEPS),
) -> Run:
    """Do the steps in a fresh process of the environment. Raises Missing."""
    # TMPDIR may be closed to others. A compiler in the background may still write into the home.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        folder.chmod(0o755)
        return run_in(folder, environment, python, steps)


def run_in(folder: Path, environment: Environment, python: str | Path, steps: Sequence[str]) -> Run:
    home, tmp = folder / "home", folder / "tmp"
    home.mkdir()
    tmp.mkdir()
    setting = environment.prepare(folder)
    changes = {"HOME": str(home), "TMPDIR": str(tmp), **setting.variables}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in NEUTRAL and not name.startswith("OPJIT_")
    }
    variables = {**kept, "PYTHONPATH": str(ROOT), **changes}
    done = subprocess.run(
        [*setting.before, python, "-m", "tests.environments", "--do", *steps],
        env={name: value for name, value in variables.items() if value is not None},
        umask=setting.umask,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        cwd=ROOT,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    did = [Step(*json.loads(line)) for line in lines]
    found = {step.name: problem_of(step, environment) for step in did}
    problems = [f"{name}: {problem}" for name, problem in found.items() if problem]
    if len(did) < len(steps):
        problems.append(f"exit code {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return Run(did, problems)


def problem_of(step: Step, environment: Environment) -> str:
    """Return what is wrong with a step, or nothing: an error, or that it was not built the fast way by the environment's compiler."""
    is_right = {
        "C op": environment.compiler in step.way,
        "C++ program": step.way == LIGHT,
        "CUDA program": bool(re.fullmatch(rf"{LIGHT}; ({'|'.join(FAST_CUDA)})[^,]*", step.way)),
    }
    slow = "" if is_right.get(step.name, True) else f"built with {step.way}"
    return step.problem or slow


def row(environment: Environment, done: Run) -> str:
    """Return the row of an environment in the table of CONTRIBUTING.md."""
    ways = {step.name: step.way for step in done.steps}
    version = re.search(r"(gcc|clang) version (\d+\.\d+)", ways.get("C op", ""))
    compiler = " ".join(version.groups()) if version else ""
    programs = re.sub(r" \w{16}$", "", ways.get("CUDA program", ""))
    result = f"{len(done.problems)} problems" if done.problems else "right"
    return f"| {environment.title} | {date.today()} | {compiler}; {programs} | {result} |"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--folder", type=Path, metavar="FOLDER")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--do", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.do:
        for step in do(options.names):
            print(f"\n{json.dumps(step)}", flush=True)
        return 0
    if options.list:
        print("\n".join(ENVIRONMENTS))
        return 0
    names = options.names or [name for name, each in ENVIRONMENTS.items() if each.release is None]
    return show(names, options.folder)


def show(names: Sequence[str], folder: Path | None) -> int:
    """Run environments, and print what they did and the table."""
    runs = {}
    for name in names:
        environment = ENVIRONMENTS[name]
        try:
            python = python_of(environment, folder)
            runs[name] = run(environment, python)
        except Missing as reason:
            print(f"{name}: not run: {reason}", flush=True)
            continue
        for step in runs[name].steps:
            print(
                f"{name}: {step.name}: {step.way or step.problem} ({step.cpu_seconds:.1f} CPU s)",
                flush=True,
            )
        for problem in runs[name].problems:
            print(f"{name}: PROBLEM: {problem}", flush=True)
    best = min((done.cpu_seconds for done in runs.values()), default=0.0)
    for name, done in runs.items():
        print(
            f"{name}: {done.cpu_seconds:.1f} CPU s, {done.cpu_seconds - best:.1f} more than the best"
        )
    print("\n| environment | date | built by | result |\n|---|---|---|---|")
    for name, done in runs.items():
        print(row(ENVIRONMENTS[name], done))
    return 1 if any(done.problems for done in runs.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
