"""What a candidate tries outside of its task has no effect, and an honest kernel is not accused of trying it."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import click
import pytest
import torch

from opjit.declare.sample import Sample
from opjit.errors import BadSetting, DeclarationError, DeviceUnavailable
from opjit.judge import Judge, command, connection, pool, protocol, sandbox, screen
from opjit.judge.burst import copied
from opjit.judge.inputs import DeliveredInputs, PackedInputs
from opjit.judge.operators import Recorder, families, profiled
from opjit.judge.protocol import TensorSpec
from opjit.judge.read_write_lock import ReadWriteLock
from opjit.judge.task import BURSTS, Expected, Task, TimedSample
from opjit.judge.trial import Trial
from opjit.judge.verdict import Verdict, VerdictReached
from opjit.measure import machine
from opjit.measure.plan import median_and_spread
from tests.helpers import elementwise

HERE = Path(__file__).parent
SCALE = str(HERE / "scale")
MODEL = str(HERE / "matmul_relu.py")
RIGHT = '#include "opjit.h"' + elementwise("scale", "(float)a * from[i]", "double a, ")
HONEST = sorted((HERE / "honest").glob("*.*"))
MODEL_NEW = """import os, socket, torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features, features) - 0.5)

    def forward(self, x):
        %s
        return (x[:, :, None] * self.weight).sum(1).clamp_min(0)
"""


def judged(task: str, texts: dict[str, str]) -> dict[str, Verdict]:
    async def run() -> list[Verdict]:
        async with Judge(task, device="cpu", workers=2) as judge:
            return await asyncio.gather(*(judge(text, name) for name, text in texts.items()))

    return {verdict.candidate: verdict for verdict in asyncio.run(run())}


def in_child(restrict: Callable[[], object], work: Callable[[], object]) -> int:
    """The status of a child that restricts itself and does some work: 0 if it worked, a signal, or an error number."""
    pid = os.fork()
    if pid == 0:
        status = 0
        try:
            restrict()
            work()
        except OSError as error:
            status = error.errno or 255
        finally:
            os._exit(status)
    status = os.waitpid(pid, 0)[1]
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "suffix"), [(SCALE, ".c"), (MODEL, ".py")])
def test_an_honest_kernel_with_words_of_cheats_is_not_accused(task: str, suffix: str) -> None:
    texts = {path.name: path.read_text("utf-8") for path in HONEST if path.suffix == suffix}
    for verdict in judged(task, texts).values():
        expected = ("wrong",) if verdict.candidate == "dict_result.py" else ("correct", "noisy")
        assert verdict.verdict in expected, verdict


@pytest.mark.slow
def test_a_candidate_changes_no_mode_and_reaches_no_listener(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.touch(mode=0o600)
    with socket.socket(socket.AF_UNIX) as unix, socket.socket(type=socket.SOCK_DGRAM) as udp:
        unix.bind(str(tmp_path / "listener"))
        unix.listen()
        udp.bind(("127.0.0.1", 0))
        unix.settimeout(0.1)
        udp.settimeout(0.1)
        texts = {
            "chmod": f"os.chmod({str(kept)!r}, 0o666)",
            "unix": f"socket.socket(socket.AF_UNIX).connect({str(tmp_path / 'listener')!r})",
            "udp": f"socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', {udp.getsockname()!r})",
        }
        verdicts = judged(MODEL, {name: MODEL_NEW % line for name, line in texts.items()})
        assert kept.stat().st_mode & 0o777 == 0o600, verdicts["chmod"]
        for listener in (unix, udp):
            with pytest.raises(TimeoutError):
                listener.recv(1) if listener is udp else listener.accept()
    assert verdicts["unix"].verdict == verdicts["udp"].verdict == "wrong"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "name"), [(SCALE, "print_verdict.c"), (MODEL, "print_verdict.py")]
)
def test_stdout_has_the_verdicts_and_no_line_of_a_candidate(task: str, name: str) -> None:
    arguments = [task, str(HERE / "cheats" / name), "--device", "cpu", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "opjit", "judge", *arguments], capture_output=True, text=True
    )
    assert "forged" not in done.stdout, done.stdout
    assert len(done.stdout.splitlines()) == 1, done.stdout


def test_a_worker_that_loads_or_computes_dies_of_starting_a_process() -> None:
    for restrict in (sandbox.allow_loading, sandbox.allow_computing):
        assert in_child(restrict, os.fork) == -31  # SIGSYS
        assert in_child(restrict, lambda: sum(range(9))) == 0


def test_a_worker_that_computes_cannot_open_a_file_and_one_that_loads_can() -> None:
    def read() -> None:
        os.close(os.open(__file__, os.O_RDONLY))

    assert in_child(sandbox.allow_loading, read) == 0
    assert in_child(sandbox.allow_computing, read) == 13  # EACCES


def test_a_worker_with_programs_starts_them_and_makes_no_socket(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(mode=0o600)
    assert in_child(sandbox.allow_programs, lambda: subprocess.run(["true"], check=True)) == 0
    assert in_child(sandbox.allow_programs, lambda: socket.socket(socket.AF_UNIX)) == 38  # ENOSYS
    assert in_child(sandbox.allow_programs, lambda: os.chmod(path, 0o666)) == 0
    assert path.stat().st_mode & 0o777 == 0o600
    os.utime(path, (1, 1))
    assert in_child(sandbox.allow_programs, lambda: os.utime(path, (2, 2))) == 0
    assert path.stat().st_mtime == 1
    assert in_child(sandbox.allow_programs, path.touch) == 0
    assert path.stat().st_mtime > 2
    new = tmp_path / "new"
    assert in_child(sandbox.allow_programs, new.touch) == 0
    assert new.exists()
    datagrams = (socket.AF_UNIX, socket.SOCK_DGRAM)
    assert in_child(sandbox.allow_programs, lambda: socket.socketpair(*datagrams)) == 38


def test_files_can_be_written_in_the_given_folder_and_on_named_devices_only(tmp_path: Path) -> None:
    def restrict() -> None:
        assert sandbox.restrict_files(sandbox.all_but_devices(), [str(tmp_path)])

    def write(path: str) -> Callable[[], object]:
        return lambda: os.close(os.open(path, os.O_WRONLY | os.O_CREAT))

    if in_child(restrict, lambda: None) != 0:
        pytest.skip("needs Landlock")
    assert in_child(restrict, write(str(tmp_path / "file"))) == 0
    assert in_child(restrict, write("/dev/null")) == 0
    for path in (str(tmp_path.parent / "file"), "/dev/shm/opjit-test", "/dev/tty"):
        assert in_child(restrict, write(path)) in (13, 6, 1), path
        assert not path.endswith("test") or not Path(path).exists()


def compiled(folder: Path, text: str, *flags: str) -> Path:
    (folder / "code.c").write_text(text, "utf-8")
    subprocess.run(["gcc", *flags, "-c", "code.c", "-o", "code.o"], cwd=folder, check=True)
    return folder


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('void *f(void) __asm__("PyObject_CallMethod");\nvoid *g(void) { return f(); }', "Python"),
        ("int fork(void);\nint g(void) { return fork(); }", "processes"),
        ("__attribute__((constructor)) void g(void) { *(volatile char *)8 = 1; }", "is loaded"),
        ('__asm__(".pushsection .init, \\"ax\\"\\nnop\\n.popsection");', "is loaded"),
        ('void g(void) { __asm__ volatile("int $0x80"); }', "system calls"),
    ],
)
def test_the_object_file_decides_what_a_candidate_imports(
    tmp_path: Path, text: str, reason: str
) -> None:
    if os.uname().machine != "x86_64" and "int $" in text:
        pytest.skip("an instruction of x86-64")
    with pytest.raises(VerdictReached, match=reason):
        screen.check_objects(compiled(tmp_path, text), on_gpu=False)


def test_words_in_texts_and_names_are_no_imports(tmp_path: Path) -> None:
    text = """
const char *message = "syscall int $0x80 .init_array fork PyObject_Call";
int destructor, persisting, byte;
long sysconf(int);
__attribute__((target_clones("avx2", "default"))) int twice(int x) { return 2 * x; }
long g(void) { return sysconf(1) + twice(destructor); }
"""
    screen.check_objects(compiled(tmp_path, text), on_gpu=False)
    with pytest.raises(VerdictReached, match="imports sysconf, which judged CUDA") as raised:
        screen.check_objects(tmp_path, on_gpu=True)
    assert raised.value.word == "compile"


def test_operators_are_found_below_modes_in_threads_and_by_families() -> None:
    x = torch.rand(8, 8)

    def hidden() -> None:
        with torch._C._DisableTorchDispatch():
            torch.nn.functional.linear(x, x).clamp(min=0)

    elements = Counter[str]()
    with profiled(elements):
        thread = threading.Thread(target=hidden)
        thread.start()
        thread.join()
    assert families(elements, 16) >= {"matmul", "clamp"}
    elements.clear()
    with Recorder(elements):
        torch.relu(torch.addmm(x, x, x))
        x[:1, :1].exp()
    found = families(elements, 16)
    assert found == {"matmul", "clamp"}, "a small tensor does not count"


def test_operators_of_all_namespaces_are_found_and_small_calls_add_up() -> None:
    x = torch.rand(8, 8)
    elements = Counter[str]()
    with profiled(elements):
        torch.ops.mkldnn._linear_pointwise(x, x, None, "relu", [], "")
        for row in x.split(1):
            row.exp()
        torch.nn.functional.conv1d(x[None], x[:, :, None])
        assert not torch.autograd.profiler._is_profiler_enabled
    found = families(elements, 64)
    assert found >= {"mkldnn::_linear_pointwise", "exp", "convolution", "matmul"}


def test_a_message_has_its_class_and_the_types_of_its_fields() -> None:
    sent = protocol.Described(
        ((TensorSpec("float32", (2, 3)), 1.5, None),), True, {"aten::mm": 9}, ""
    )
    kinds = [protocol.Described, VerdictReached]
    one, other = protocol.Channel.pair()
    with one.end, other.end:
        one.send(sent)
        assert other.receive(kinds) == (sent, [])
    for body in (
        b"{}",
        b"nonsense",
        b'["Described", {"results": [], "changed": 1, "elements": {}, "evidence": ""}]',
        b'["Described", {"results": []}]',
        b'["VerdictReached", {"word": "excellent", "message": ""}]',
        b'["VerdictReached", {"word": "correct", "message": ""}]',
        b'["Done", {}]',
    ):
        with pytest.raises(VerdictReached):
            protocol.decode(body, kinds)


def test_a_file_above_the_limit_or_without_seals_is_not_read() -> None:
    with pytest.raises(VerdictReached, match="at most 99"):
        protocol.read_sealed(protocol.sealed(bytes(100)), 99)
    assert protocol.read_sealed(protocol.sealed(bytes(99)), 99) == bytes(99)
    with pytest.raises(VerdictReached, match="not sealed"):
        protocol.read_sealed(os.memfd_create("open"), 99)


def test_results_beyond_their_bytes_are_refused() -> None:
    spec = TensorSpec("float32", (2, 3))
    with pytest.raises(VerdictReached, match="beyond its file"):
        protocol.decode_results([spec], memoryview(bytes(23)))
    with pytest.raises(VerdictReached):
        protocol.decode_results([TensorSpec("float99", (1,))], memoryview(bytes(4)))


def test_memory_of_another_process_is_read_while_it_stands_still() -> None:
    data = torch.arange(5000)
    sizes = [8] * 5000
    addresses = [data.data_ptr() + 8 * number for number in range(5000)]
    read = connection.read_memory(os.getpid(), addresses, sizes)
    assert torch.frombuffer(bytearray(read), dtype=torch.int64).equal(data)
    with pytest.raises(OSError, match="Input/output error"):
        connection.read_memory(os.getpid(), [8], [8])


def test_results_that_were_copied_in_time_do_not_change_later() -> None:
    result = torch.ones(3)
    for reserved in ([torch.empty(3)], []):
        result.fill_(1)
        made = copied([result], reserved)
        result.zero_()
        assert made[0].eq(1).all()


@pytest.mark.parametrize("key", [None, 7])
@pytest.mark.parametrize("writes", [False, True])
def test_inputs_have_their_values_only_after_the_clock_started(
    key: int | None, writes: bool
) -> None:
    whole = torch.rand(4, 6)
    values = [((whole, whole[1:, ::2]), {"n": 3, "i": torch.arange(5)}), ((torch.empty(0, 2),), {})]
    packed = PackedInputs.of(values, key)
    places, *masked = packed.early
    made = DeliveredInputs(places, "cpu", *masked, writes=writes)
    [((first, part), named), ((empty,), _)] = made.calls
    assert (part.stride(), empty.shape, named["n"]) == ((6, 2), (0, 2), 3)
    assert not first.eq(whole).any()
    made.reveal(*packed.late, key=key)
    assert first.equal(whole)
    assert part.equal(whole[1:, ::2])
    assert named["i"].equal(torch.arange(5))
    part += 1
    assert first.equal(whole) is False, "they share memory as the given tensors do"
    assert made.changed()


@pytest.mark.slow
def test_a_worker_that_cannot_be_read_sends_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = PermissionError(1, "no")
    monkeypatch.setattr(pool, "read_memory", Mock(side_effect=refused))
    [verdict] = judged(SCALE, {"a.c": RIGHT}).values()
    assert verdict.verdict in ("correct", "noisy"), verdict
    assert "frozen results" not in verdict.isolation


def test_a_writer_is_alone_and_goes_before_waiting_readers() -> None:
    lock = ReadWriteLock()
    inside = []
    order: list[str] = []

    def use(name: str, writes: bool) -> None:
        with lock.exclusive() if writes else lock.shared():
            inside.append(name)
            assert len(inside) == 1 or not writes
            order.append(name)
            inside.remove(name)

    with lock.shared():
        writer = threading.Thread(target=use, args=("writer", True))
        writer.start()
        while not lock._writers:
            pass
        readers = [threading.Thread(target=use, args=(f"reader {i}", False)) for i in range(3)]
        for each in readers:
            each.start()
        assert order == []
    for each in (writer, *readers):
        each.join()
    assert order[0] == "writer"
    assert len(order) == 4

    order.clear()
    with lock.exclusive():
        reader = threading.Thread(target=use, args=("reader", False))
        reader.start()
        writer = threading.Thread(target=use, args=("writer", True))
        writer.start()
        until = time.monotonic() + 10
        while lock._writers < 2:
            assert time.monotonic() < until, "the next writer is not known"
    for each in (writer, reader):
        each.join()
    assert order == ["writer", "reader"]


def test_serve_removes_no_file_that_it_did_not_make(tmp_path: Path) -> None:
    kept = tmp_path / "candidate.c"
    kept.write_text("text", "utf-8")

    class Stub:
        async def __aenter__(self) -> None:
            pass

        async def __aexit__(self, *error: object) -> None:
            pass

    with pytest.raises(BadSetting, match="removes no file"):
        asyncio.run(command.serve(Stub(), kept))  # type: ignore[arg-type]
    assert kept.read_text("utf-8") == "text"

    async def serve_briefly(path: Path) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(command.serve(Stub(), path), 0.2)  # type: ignore[arg-type]

    path = tmp_path / "socket"
    asyncio.run(serve_briefly(path))
    assert not path.exists()


def test_a_client_gets_an_answer_if_the_judge_fails() -> None:
    class Failing:
        async def __call__(self, text: str, name: str) -> Verdict:
            raise DeviceUnavailable("its process ended")

    answer = asyncio.run(command._reply(Failing(), b'{"text": "a candidate"}'))  # type: ignore[arg-type]
    assert "its process ended" in json.loads(answer)["error"]


def test_a_task_that_others_can_change_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "task.py"
    path.write_text("raise SystemExit('it was run')", "utf-8")
    path.chmod(0o666)
    with pytest.raises(DeclarationError, match="refusing to run"):
        Task(str(path), "cpu", 0)


def test_a_verdict_for_people_has_times_and_the_call_that_showed_it() -> None:
    text = command.shown(Verdict("a.c", "timeout", "op", "t", "did not return", sample="x"))
    assert click.unstyle(text) == "timeout  a.c  did not return on (x)"


@pytest.mark.slow
def test_an_endless_import_delays_no_other_candidate() -> None:
    text = MODEL_NEW % "pass"

    async def run() -> tuple[Verdict, Verdict]:
        async with Judge(MODEL, device="cpu", workers=2, seconds=1) as judge:
            endless = asyncio.ensure_future(judge("while True: pass", "endless"))
            other = await judge(text, "other")
            assert not endless.done()
            return await endless, other

    endless, other = asyncio.run(run())
    assert endless.verdict == "timeout", endless
    assert other.verdict in ("correct", "noisy"), other


def rated(times: list[float], references: list[float], least: float) -> tuple[str, str]:
    """The verdict on a correct candidate whose device needs at least so many seconds."""
    with (
        patch.object(machine, "bound", return_value=least),
        patch.object(machine, "megahertz", return_value=None),
    ):
        made = Trial(Mock(device="cpu", task=Mock(timed=TimedSample(Sample(()), 1, 1, 1))), "", "")
        made.facts["nondeterministic"] = False
        word, message = made._rated(times, references)
        assert made.facts["reference_spread"] == median_and_spread(references[1:])[1]
        return word, message


def test_a_verdict_is_noisy_if_the_spread_of_either_side_allows_another() -> None:
    steady = [1.0, 1.0, 1.0, 1.0, 1.1, 1.0]
    wild = [1.0, 1.0, 3.0, 9.0, 1.0, 14.0]
    wide = [1.0, 0.8, 1.2, 0.9, 1.1, 1.0]
    assert rated(steady, steady, 0.5) == ("correct", "")
    assert rated(wild, steady, 0.5)[0] == "noisy"
    word, message = rated(steady, wild, 0.5)
    assert (word, "of the reference" in message) == ("noisy", True)
    assert rated(steady, steady, 2.0)[0] == "cheat", "faster than the device allows"
    assert rated(wide, steady, 1.05)[0] == "noisy", "its spread reaches the bound"


def test_bursts_that_are_logged_differ_in_nothing_and_can_be_any() -> None:
    """A candidate may count bursts, and measure the time between them."""
    seen: set[int] = set()
    for _ in range(60):
        steps: list[tuple[str, bool]] = []

        def note(what: str, result: Any, log: bool = False, steps: Any = steps) -> Any:
            steps.append((what, log))
            return result

        made = Trial(Mock(device="cpu", seconds=1, device_lock=ReadWriteLock()), "", "")
        made.worker = Mock()
        made.worker.ask = lambda *_, log=False, **__: note("prepare", None, log)
        made.worker.run = lambda *_: note("run", (1e-3, None))
        call = Expected(Sample((torch.ones(2),)), [torch.ones(2)])
        reference = Mock()
        reference.seconds_of_call = lambda: note("reference", 1e-3)
        bursts = [pool.PackedBurst([call] * 9, Mock(early=[]), reference)] * (BURSTS - 1)
        with patch.object(made, "_compare"), patch.object(made, "_rated") as rated:
            made._measure(0.0, 1e-3, bursts)
        assert len(rated.call_args[0][0]) > 5, "are timed"
        made_each = [steps[i : i + 3] for i in range(0, len(steps), 3)]
        assert {tuple(name for name, _ in each) for each in made_each} == {
            ("prepare", "reference", "run")
        }
        logged = [number for number, [(_, log), *_] in enumerate(made_each) if log]
        assert len(logged) >= 2
        seen.update(logged)
    assert seen >= set(range(8))


def test_a_kernel_is_timed_alone_and_its_facts_are_those_of_the_bench() -> None:
    lock = ReadWriteLock()
    facts: dict[str, dict[str, Any]] = {
        "compile": {"registers": 8, "isolation": ["no host code"]},
        "check": {"nondeterministic": False},
        "measure": {},
        "compare": {"max_error": 0.5, "times": [1.0, 2.0], "references": [3.0]},
    }
    asked: list[tuple[str, int, int]] = []

    def ask(seconds: float, method: str, **arguments: object) -> object:
        asked.append((method, lock._readers, lock._writers))
        if method == "compare" and asked.count(asked[-1]) == 2:
            raise VerdictReached("wrong", "returns all zeros", True, {"max_error": 7.0})
        return facts.get(method, {})

    trials = Mock(device="cuda", seconds=1, device_lock=lock)
    trials.bench = lambda: contextlib.nullcontext(Mock(ask=ask))
    text = "// opjit: launch scale(x, out) grid=1 block=64"
    with patch.object(Trial, "_rated", return_value=("correct", "")) as rated:
        right = Trial(trials, text, "a.cu").run()
        wrong = Trial(trials, text, "b.cu").run()
    stages = [("open", 0, 0), ("compile", 0, 0), ("check", 1, 0), ("measure", 0, 1)]
    assert asked == 2 * [*stages, ("compare", 1, 0)]
    rated.assert_called_once_with([1.0, 2.0], [3.0])
    assert (right.tier, right.registers, right.max_error) == ("device", 8, 0.5)
    assert [*right.seconds] == ["build", "check", "measure", "compare"]
    assert (wrong.verdict, wrong.max_error, wrong.isolation) == ("wrong", 7.0, ["no host code"])


def test_what_a_candidate_starts_stands_still_with_it() -> None:
    text = "import subprocess\nsubprocess.Popen(['sleep', '99'], start_new_session=True)\nwhile True: pass"
    judge = Judge(MODEL, device="cpu", workers=1)
    judge.start()

    def states(pid: int) -> list[str]:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        stats = [Path(f"/proc/{each}/stat").read_text() for each in (pid, *children)]
        return [each.rpartition(")")[2].split()[0] for each in stats]

    try:
        trial = Trial(judge.pools[0], text, "candidate.py")
        with contextlib.closing(judge.pools[0].worker()) as trial.worker:
            trial._send_candidate()
            found: list[str] = []
            while len(found) < 2:
                found = states(trial.worker._command("freeze"))
                trial.worker._command("resume")
            pid = trial.worker._command("freeze")
            until = time.monotonic() + 5
            while states(pid) != ["T", "T"]:  # each stops when it runs next
                assert time.monotonic() < until, states(pid)
    finally:
        judge.close()


def test_a_build_keeps_nobody_from_being_timed() -> None:
    """While another trial has the lock, the worker stands still; the wait for it has a limit."""
    lock = ReadWriteLock()
    asked: list[str] = []
    control, requests = protocol.Channel.pair(), protocol.Channel.pair()
    ends = [*control, *requests]
    made = connection.WorkerConnection(control[0], requests[0])
    done = threading.Event()
    alone: list[list[str]] = []

    def keep() -> None:
        with contextlib.suppress(EOFError):
            while True:
                message, _ = control[1].receive([protocol.Ask])
                asked.append(message.method)
                control[1].send(protocol.Done({"pid": 1}))

    def time_others() -> None:
        while not done.is_set():
            with lock.exclusive():
                before = asked[-1:]
                done.wait(0.1)
                alone.append([*before, *asked[-1:]])
            done.wait(0.02)

    threads = [threading.Thread(target=work, daemon=True) for work in (keep, time_others)]
    for each in threads:
        each.start()
    with pytest.raises(VerdictReached, match="did not return within"):
        made.wait_in_turns(lock, 1)
    done.set()
    assert asked.count("resume") >= 6, "only the time of its turns counts"
    assert len(alone) > 2
    assert all(set(each) <= {"freeze"} for each in alone), alone
    requests[1].send(protocol.Done())
    made.wait_in_turns(lock, 60)
    assert asked[-1] == "resume"
    for channel in ends:
        channel.end.close()
