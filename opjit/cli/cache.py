"""The commands ``opjit cache …``. Each is a few lines that call opjit.cache."""

import sys
import time
from collections import Counter
from pathlib import Path

import click
from click import ClickException, argument, echo, option

from opjit.cli.help import (
    FILE,
    FOLDER,
    Group,
    PrintJson,
    flag,
    json_option,
    ops_argument,
    remark,
    reporter,
    subcommand,
)
from opjit.progress import ago, tally

_KEY_DIGITS = 12  # of a key's 64; `opjit cache ls --json` has all


@click.group(cls=Group)
def cache() -> None:
    """Inspect, maintain and exchange the cache's entries."""


@subcommand("opjit cache path", declares=False)
def path() -> None:
    """Print the directory of the cache."""
    from opjit.store.store import default_root

    echo(default_root())


@subcommand("opjit cache ls", declares=False)
@json_option
def ls(print_json: PrintJson) -> None:
    """List the entries: op, arch, size, last use and key."""
    from opjit import cache
    from opjit.store import inventory
    from opjit.store.store import default_store

    items = cache.entries()
    if print_json is not None:
        print_json([{**item._asdict(), "used": item.used} for item in items])
        return
    now = time.time()
    rows = [
        (item.op, item.arch, _size(item.size), ago(now - item.used), item.key) for item in items
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    fits = not sys.stdout.isatty() or sum(widths) + _KEY_DIGITS + 8 <= 80
    for op, arch, size, used, key in rows:
        rest = f"{arch:<{widths[1]}}  {size:>{widths[2]}}  {used:>{widths[3]}}  {key[:_KEY_DIGITS]}"
        echo(f"{op:<{widths[0]}}  {rest}" if fits else f"{op}\n  {rest}")
    if items:
        echo(f"{tally(len(items), 'entry')}, {_size(sum(item.size for item in items))}")
    sizes = [part.size for part in inventory.parts(default_store())]
    if sizes:
        echo(f"parts of builds: {len(sizes)}, {_size(sum(sizes))}")


@subcommand("opjit cache stats", declares=False)
@json_option
def stats(print_json: PrintJson) -> None:
    """Count hits, fetches and builds.

    A process adds its counts when it ends.
    """
    from opjit import cache

    found = cache.stats()
    if print_json is not None:
        print_json({"path": cache.path(), **found._asdict()})
        return
    since = (
        time.strftime("since %Y-%m-%d %H:%M", time.localtime(found.since))
        if found.since
        else "nothing was counted yet"
    )
    echo(f"hits {found.hits}, fetches {found.fetches}, builds {found.builds}; {since}")


@subcommand("opjit cache verify", "opjit cache verify --json")
@json_option
def verify(print_json: PrintJson) -> None:
    """Compare every entry with its manifest.

    The exit code is 1 if an entry is damaged. When an op needs this entry, opjit replaces it.
    """
    from opjit import cache
    from opjit.cache.verification import BAD, GOOD
    from opjit.doctor import open_folders
    from opjit.store.store import default_store

    found = cache.verify()
    for item, verdict, reason in found:
        if reason:
            echo(f"{verdict}: {item.op}  {item.arch}  {item.key}: {reason}")
    counts = Counter(each.verdict for each in found)
    parts = [f"{counts[verdict]} {verdict}" for verdict in (GOOD, BAD) if counts[verdict]]
    echo(f"{tally(len(found), 'entry')}: {', '.join(parts)}".removesuffix(": "))
    for problem in open_folders(default_store().base):
        remark(f"warning: {problem}, so opjit does not use it")
    if print_json is not None:
        print_json(
            [
                {**item._asdict(), "verdict": verdict, "reason": reason}
                for item, verdict, reason in found
            ]
        )
    sys.exit(bool(counts[BAD]))


@subcommand("opjit cache prune --size 5GiB --age 30d", declares=False)
@option(
    "--size",
    help="Remove the least recently used entries beyond this size. Default: OPJIT_CACHE_SIZE, or 10GiB.",
)
@option(
    "--age",
    help="Remove entries that have not been used for this time, for example 30d, 12h or 2w. 0 means no limit. Default: 90d.",
)
def prune(size: str | None, age: str | None) -> None:
    """Remove entries that have not been used for a long time.

    opjit also does this after a build, at most once a day. A process that has loaded a removed entry
    keeps running.
    """
    from opjit import cache

    done = cache.prune(size, age)
    echo(
        f"removed {tally(done.removed, 'entry')}, {_size(done.freed)}; {tally(done.kept, 'entry')}, {_size(done.size)}, remain"
    )
    if done.fresh:
        echo(
            f"kept {tally(done.fresh, 'entry')} from the last hour; `opjit cache clear` removes everything"
        )
    if done.failed:
        raise ClickException(f"{tally(done.failed, 'entry')} could not be removed")


@subcommand("opjit cache clear allreduce", declares=False)
@ops_argument("[OP...]")
def clear(ops: tuple[str, ...]) -> None:
    """Remove all entries, or the entries of each OP.

    A process that has loaded a removed entry keeps running.
    """
    from opjit import cache

    done = cache.clear(*ops)
    echo(f"removed {tally(done.removed, 'entry')}, {_size(done.freed)}, from {cache.path()}")
    if done.failed:
        raise ClickException(f"{tally(done.failed, 'entry')} could not be removed")


@subcommand("opjit cache push s3://bucket/opjit --sign keys/ci.key")
@ops_argument("[URL] [OP]...")
@option("--sign", type=FILE, help="Sign the entries with the private key in this file.")
@flag("--unsigned", "Upload without signatures. Only OPJIT_TRUST=unsigned accepts these entries.")
def push(ops: tuple[str, ...], sign: Path | None, unsigned: bool) -> None:
    """Upload entries to a remote cache.

    The command uploads all entries, or the entries of each OP, to URL (default: OPJIT_REMOTE). It skips
    entries that the remote cache already has. For a C++ extension, use cpp_extension::NAME, as
    `opjit cache ls` shows it.
    """
    from opjit.cache import transfer

    if (sign is None) != unsigned:
        raise click.UsageError(
            "expected --sign KEY (run `opjit keygen` to make one), or --unsigned"
        )
    url, names = _url(ops)
    _print_report("uploaded", *transfer.push(url, sign=sign, ops=names, say=reporter()))


@subcommand("opjit cache pull s3://bucket/opjit allreduce")
@ops_argument("[URL] [OP]...")
def pull(ops: tuple[str, ...]) -> None:
    """Download entries from a remote cache.

    The command downloads all entries, or the entries of each OP, from URL (default: OPJIT_REMOTE), for
    every architecture. It skips entries that the cache already has. A web server cannot list its
    entries, so with an http URL the command fails. opjit still downloads an entry from a web server
    when an op needs it, and `opjit precompile` does the same.
    """
    from opjit.cache import transfer

    url, names = _url(ops)
    _print_report("fetched", *transfer.pull(url, ops=names, say=reporter()))


@subcommand(
    "opjit cache pack ops.pack --sign keys/ci.key",
    "opjit cache pack engines.tree --tree TRITON_CACHE_DIR ~/.triton/cache --sign keys/ci.key",
)
@argument("file", type=FILE)
@ops_argument("[OP]...")
@option(
    "--tree",
    "roots",
    type=(str, FOLDER),
    metavar="VARIABLE DIR",
    multiple=True,
    help="Pack this cache of another compiler instead, for `opjit run --tree`. VARIABLE leads the compiler to it.",
)
@option(
    "--sign",
    type=FILE,
    help="Sign with the private key in this file. Only OPJIT_TRUST=unsigned accepts unsigned entries.",
)
def pack(
    file: Path, ops: tuple[str, ...], roots: list[tuple[str, Path]], sign: Path | None
) -> None:
    """Write entries into one archive.

    The archive has all entries, or the entries of each OP, for every host CPU and architecture. With
    --tree, it has the caches of other compilers.
    """
    from opjit.cache import transfer, trees

    if roots and ops:
        raise click.UsageError("expected OPs or --tree, got both")
    if roots:
        _print_report("packed", *trees.pack_tree(file, dict(roots), sign))
    else:
        _print_report("packed", *transfer.pack(file, sign=sign, ops=ops))


@subcommand("opjit cache unpack ops.pack")
@argument("file", type=FILE)
def unpack(file: Path) -> None:
    """Add the entries of an archive to the cache.

    FILE is an archive from `opjit cache pack`. OPJIT_TRUST must contain the public key of its signer.
    """
    from opjit.cache import transfer

    _print_report("unpacked", *transfer.unpack(file, say=reporter()))


def _size(count: float) -> str:
    if count < 1 << 10:
        return f"{count:.0f} B"
    power = min(3, (int(count).bit_length() - 1) // 10)
    return f"{count / (1 << 10 * power):.1f} {'KMG'[power - 1]}iB"


def _url(words: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    return (words[0], words[1:]) if words and "://" in words[0] else (None, words)


def _print_report(done: str, moved: list[str], there: int, problems: list[str]) -> None:
    for problem in problems:
        echo(problem, err=True)
    echo(f"{done} {len(moved)}, {there} already there, {len(problems)} left out")
    sys.exit(bool(problems))


cache.add_section("Inspect", path, ls, stats, verify)
cache.add_section("Maintain", prune, clear)
cache.add_section("Exchange", push, pull, pack, unpack)
