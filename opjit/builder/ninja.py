"""ninja runs the commands of a build: in parallel, within the limits of the machine, and no longer than the program that builds."""

import os
import re
import shlex
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from opjit import processes, progress
from opjit.builder import budget
from opjit.builder.compile_step import CommandFailed
from opjit.errors import ToolMissing
from opjit.recipe import compilers, recorder

_FILE = "commands.ninja"  # torch's own build.ninja may be in the folder
_PROGRESS = re.compile(r"^(?:\[\d+/\d+\] (.*)|ninja: .*)\n", re.MULTILINE)  # its own words


@dataclass(frozen=True)
class ToolCommand:
    """A command of a build: a compilation, or a link.

    Attributes:
        command: its words.
        output: the file that it makes.
        folder: the folder in which it runs.
        needs: the outputs of other steps that it reads.
        source: the file that it compiles.
        key: its text in the key of an object file, if that is not the command.
    """

    command: Sequence[str]
    output: Path
    folder: Path
    needs: Sequence[Path] = ()
    source: str = ""
    key: str = ""

    @property
    def done(self) -> Path:
        """The file that says that the command succeeded: a failed or killed one may leave half an output."""
        return self.output.with_name(f"{self.output.name}.done")

    @property
    def log(self) -> Path:
        """The file with the questions of its tools."""
        return self.output.with_name(f"{self.output.name}.{recorder.LOG}")


def run_commands(
    steps: Sequence[ToolCommand], work: Path, honours: bool = False, need: int = budget.C_JOB
) -> str:
    """Write a file for ninja in a folder, run it, and return the output of the tools.

    For `honours`, see `compilers.environment`. `need` is the memory of a command in bytes. Raises CommandFailed if a command fails, after
    the commands that ran with it have ended, and OSError if the disk is full.
    """
    if not steps:
        return ""
    blocks = ["ninja_required_version = 1.3", "rule run\n  command = $command"]
    blocks += map(_rule, steps)
    text = "\n\n".join([*blocks, ""])
    (work / _FILE).write_text(text, "utf-8", "surrogateescape")
    environment = compilers.environment(honours, work / "ninja.log")
    try:
        return run_ninja(
            ["ninja", "-v", "-f", _FILE], work, environment, [step.log for step in steps], need
        )
    except CommandFailed as failed:
        output = str(failed)
        for step in steps:
            output = output.replace(_recorded(step), shlex.join(step.command))
        raise CommandFailed(output) from None


def run_ninja(
    command: Sequence[str],
    work: Path,
    environment: dict[str, str],
    logs: Sequence[Path],
    need: int = budget.C_JOB,
) -> str:
    """Run ninja in the folder of a build.ninja, and return the output of the tools.

    `logs` are the records of the tools. Raises as `run_commands` does.
    """
    program = shutil.which("ninja") or shutil.which(f"{sysconfig.get_path('scripts')}/ninja")
    if program is None:
        raise ToolMissing("ninja", "no ninja on PATH; pip install ninja")
    words = [program, *command[1:], *_limits(need)]
    done = processes.run_printing(words, cwd=work, env=environment, limit=compilers.time_limit())
    for said in _PROGRESS.findall(done.stdout):
        progress.logger().debug("%s", said)
    output = _PROGRESS.sub("", recorder.without_complaints(done.stdout))
    if done.returncode:
        recorder.refuse_endless(logs)
        compilers.refuse_full_disk(output, work)
        raise CommandFailed(output)
    return output


def _limits(need: int) -> list[str]:
    """Return ninja's limits: as many commands at once as CPUs and memory allow, and fewer while other programs load the machine."""
    jobs = ["-j", str(budget.width(need))]
    if os.environ.get("OPJIT_JOBS") or os.environ.get("MAX_JOBS"):
        return jobs
    return [*jobs, "-l", str(os.cpu_count() or 1)]


def _rule(command: ToolCommand) -> str:
    needs = " ".join(_named(str(each)) for each in command.needs)
    text = _recorded(command).replace("$", "$$")
    return f"build {_named(str(command.output))}: run {needs}\n  command = {text}"


def _recorded(command: ToolCommand) -> str:
    """Return the line of the shell that runs a command in its folder, under the recorder."""
    variables = [f"{name}={value}" for name, value in recorder.watching(command.log).items()]
    steps = [
        shlex.join(["cd", str(command.folder)]),
        shlex.join(["env", *variables, *command.command]),
        f": > {shlex.quote(str(command.done))}",
    ]
    return " && ".join(steps)


def _named(path: str) -> str:
    return re.sub(r"([$ :])", r"$\1", path)
