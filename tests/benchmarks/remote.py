"""What a remote costs a process: one that is dead, and one that works.

    python tests/benchmarks/remote.py

    dead        seconds that a fresh process spends on a remote that fails in some way, imports included; it must say so in one warning
                (none for «not there»), and get nothing. The bar is one second, once in a process
    good        seconds from the request to a verified entry in an empty cache, against a build of the same op by the same compiler,
                both in fresh processes

The web servers run in this process. Object stores are measured where s3fs and moto are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from common import Row, alone, child, ratio, show  # noqa: E402

from tests.remotes import (  # noqa: E402
    Behaviour,
    Handler,
    black_hole,
    drip,
    endless,
    from_folder,
    half_then_reset,
    serving,
)

BAR = 1.0


def _page(content: bytes, status: int = 200) -> Behaviour:
    return lambda handler: handler.answer(content, status)


def _slow_line(content: bytes) -> Behaviour:
    """0.2 s to the first byte, then 200 KB in 0.1 s."""

    def behave(handler: Handler) -> None:
        time.sleep(0.2)
        handler.send_response(200)
        handler.end_headers()
        for start in range(0, len(content), 1 << 13):
            handler.wfile.write(content[start : start + (1 << 13)])
            time.sleep(0.004)

    return behave


SERVERS: dict[str, Behaviour] = {
    "answers 500": _page(b"oops", 500),
    "never answers": lambda handler: time.sleep(30),
    "drips": drip,
    "resets in the middle": half_then_reset,
    "sends without end": endless,
    "sends nothing": _page(b""),
    "sends a web page": _page(b"<html></html>"),
}


@contextmanager
def dead() -> Iterator[dict[str, str]]:
    """URLs of remotes that fail, by how."""
    with ExitStack() as stack:
        closed = stack.enter_context(socket.socket())
        closed.bind(("127.0.0.1", 0))
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        urls = {
            "refuses connections": f"http://127.0.0.1:{closed.getsockname()[1]}",
            "drops connections": stack.enter_context(black_hole()),
            "is a silent socket": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "has no address": "https://opjit.invalid",
            **{how: stack.enter_context(serving(behave)).url for how, behave in SERVERS.items()},
        }
        if importlib.util.find_spec("s3fs"):
            urls["refuses connections, s3fs"] = "s3://bucket/opjit"
        yield urls


def measure_dead(cache: str, trust: str, rounds: int) -> list[Row]:
    rows = []
    with dead() as urls, serving(_page(b"", 404)) as empty:
        for how, url in {**urls, "has no such entry": empty.url}.items():
            env = {
                "OPJIT_CACHE": cache,
                "OPJIT_TRUST": trust,
                "OPJIT_REMOTE": url,
                "AWS_ACCESS_KEY_ID": "x",
                "AWS_SECRET_ACCESS_KEY": "x",
                "AWS_ENDPOINT_URL": urls["refuses connections"],
            }
            results = [child(HERE / "remote_child.py", "fetch", env=env) for _ in range(rounds)]
            for result in results:
                if result["fetched"] or len(result["warnings"]) != (url != empty.url):
                    sys.exit(f"a remote that {how} gave {result}")
            rows.append(alone(how, [result["seconds"] for result in results], BAR))
    return rows


def measure_good(folder: Path, cache: Path, trust: str, rounds: int) -> list[Row]:
    def entries(url: str) -> list[float]:
        spent = []
        for _ in range(rounds):
            shutil.rmtree(cache / "v2" / "opjit.allreduce", ignore_errors=True)
            result = child(
                HERE / "remote_child.py",
                "entry",
                env={"OPJIT_CACHE": str(cache), "OPJIT_TRUST": trust, "OPJIT_REMOTE": url},
            )
            if result["fetched"] != bool(url) or result["warnings"]:
                sys.exit(f"the remote {url or '(none)'} gave {result}")
            spent.append(result["seconds"])
        return spent

    [name] = [path.relative_to(folder).as_posix() for path in folder.rglob("*.opjit")]
    content = (folder / name).read_bytes()
    built = entries("")
    rows = []
    rows.append(ratio("a folder", entries(folder.as_uri()), built, 1.0))
    kinds: dict[str, Behaviour] = {
        "a web server": from_folder(folder),
        "a web server, 0.2 s away": from_folder(folder, 0.2),
        "a slow line": _slow_line(content),
    }
    for kind, behave in kinds.items():
        with serving(behave) as server:
            rows.append(
                ratio(
                    kind,
                    entries(server.url),
                    built,
                    None if "0.2" in kind or "slow" in kind else 1.0,
                )
            )
    if importlib.util.find_spec("s3fs") and importlib.util.find_spec("moto"):
        rows.append(ratio("an object store", _object_store(folder, entries), built))
    return rows


def _object_store(folder: Path, entries: Callable[[str], list[float]]) -> list[float]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        os.environ.update(
            AWS_ACCESS_KEY_ID="x",
            AWS_SECRET_ACCESS_KEY="x",
            AWS_ENDPOINT_URL=f"http://{host}:{port}",
        )
        import s3fs

        store = s3fs.S3FileSystem()
        store.mkdir("bucket")
        store.put(f"{folder}/v2", "bucket/opjit/", recursive=True)
        return entries("s3://bucket/opjit")
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="fresh processes for each line")
    rounds = parser.parse_args().rounds
    os.environ["no_proxy"] = "*"
    with tempfile.TemporaryDirectory() as temporary:
        cache = Path(temporary) / "cache"
        folder = Path(temporary) / "remote"
        os.environ["OPJIT_CACHE"] = str(cache)
        from opjit.cache import transfer
        from opjit.share import trust

        # Builds it, and learns who the compiler is.
        child(HERE / "remote_child.py", "entry", env={"OPJIT_REMOTE": ""})
        private, public = trust.keygen("bench", temporary)
        transfer.push(folder.as_uri(), sign=private)
        good = measure_good(folder, cache, public, rounds)
        shutil.rmtree(cache / "v2" / "opjit.allreduce")
        rows = measure_dead(str(cache), public, rounds)
    show("A remote that fails in some way: seconds that it adds to a process, once (medians)", rows)
    show("A remote that works, against a local build, in fresh processes (medians)", good)
    if any(row.verdict == "FAIL" for row in [*rows, *good]):
        sys.exit(1)


if __name__ == "__main__":
    main()
