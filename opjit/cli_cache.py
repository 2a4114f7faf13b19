"""The commands ``opjit cache …``, each a few lines over opjit.cache."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from opjit import cli_json

if TYPE_CHECKING:
    from opjit.transfer import Report

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@click.group()
def cache() -> None:
    """Look into the cache, keep it in order, and exchange its entries with a remote or a file."""


@cache.command()
def path() -> None:
    """Print the cache's folder."""
    from opjit import cache

    click.echo(cache.path())


@cache.command()
@cli_json.option
def ls(tell: cli_json.Tell) -> None:
    """List the entries: op, arch, size, how long ago it was used, key."""
    from opjit import cache

    items = cache.entries()
    if tell is not None:
        tell([{**item._asdict(), "used": item.used} for item in items])
        return
    now = time.time()
    rows = [(item.op, item.arch, _size(item.size), _ago(now - item.used), item.key) for item in items]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    click.echo("".join(f"{op:<{widths[0]}}  {arch:<{widths[1]}}  {size:>{widths[2]}}  {ago:>{widths[3]}}  {key}\n"
                       for op, arch, size, ago, key in rows), nl=False)


@cache.command()
@cli_json.option
def stats(tell: cli_json.Tell) -> None:
    """Show what the cache holds, how often it had what was asked for, and what that saved."""
    from opjit import cache

    found = cache.stats()
    if tell is not None:
        tell({"path": cache.path(), **found._asdict()})
        return
    places = ", ".join(f"{count} in the {where}" for where, count in found.by_place.items() if count)
    asked = found.hits + found.misses
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.since)) if found.since is not None else "nothing was counted yet"
    for name, value in (("cache", str(cache.path())), ("entries", f"{found.entries}, {_size(found.size)}"),
                        ("hits", f"{found.hits} of {asked} requests{f' ({places})' if places else ''}"), ("misses", str(found.misses)),
                        ("builds", f"{found.builds}, {_size(found.built)}"), ("time saved", _span(found.saved)), ("since", since)):
        click.echo(f"{name:<11} {value}")


@cache.command()
@click.option("--rebuild", is_flag=True, help="Also build again what a declared op would have today, and compare the bytes.")
def verify(rebuild: bool) -> None:
    """Hold every entry against its manifest; exit code 1 if one is bad. What is bad is replaced when it is asked for."""
    from opjit import checkup
    from opjit.store import Store, default_root

    counts = dict.fromkeys((checkup.GOOD, checkup.REBUILT, checkup.DIFFERENT, checkup.BAD), 0)
    for found in checkup.verify(Store(default_root()), rebuild):
        counts[found.verdict] += 1
        if found.reason:
            told = "not rebuilt" if found.in_order else found.verdict
            click.echo(f"{told}: {found.item.op}  {found.item.arch}  {found.item.key}: {found.reason}")
    names = {checkup.GOOD: "good, not rebuilt"} if rebuild else {}
    parts = [f"{count} {names.get(verdict, verdict)}" for verdict, count in counts.items() if count]
    click.echo(f"{_entries(sum(counts.values()))}{': ' if parts else ''}{', '.join(parts)}")
    sys.exit(1 if counts[checkup.BAD] + counts[checkup.DIFFERENT] else 0)


@cache.command()
@click.option("--size", help="Remove what was not used for longest until the cache has this size; default: OPJIT_CACHE_SIZE, else 10GiB.")
@click.option("--age", help="Remove what was not used for this long (30d, 12h, 2w; 0: nothing for its age); default: 90d.")
def prune(size: str | None, age: str | None) -> None:
    """Remove what nobody used for long. Builds do this by themselves, once a day; what is loaded somewhere keeps working there."""
    from opjit import cache

    done = cache.prune(size, age)
    click.echo(f"removed {_entries(done.removed)}, {_size(done.freed)}; {_entries(done.kept)}, {_size(done.size)}, are left")
    if done.fresh:
        click.echo(f"{_entries(done.fresh)} of the last hour stayed; `opjit cache clear` removes everything")
    if done.failed:
        raise click.ClickException(f"{_entries(done.failed)} could not be removed")


@cache.command()
@click.argument("ops", metavar="[OP...]", nargs=-1)
def clear(ops: tuple[str, ...]) -> None:
    """Remove the entries of each OP, or all there are. Processes that have one loaded keep it."""
    from opjit import cache

    done = cache.clear(*ops)
    click.echo(f"removed {_entries(done.removed)}, {_size(done.freed)}, from {cache.path()}")
    if done.failed:
        raise click.ClickException(f"{_entries(done.failed)} could not be removed, or {'is' if done.failed == 1 else 'are'} of another "
                                   "version of opjit")


@cache.command()
@click.argument("ops", metavar="[URL] [OP]...", nargs=-1)
@click.option("--sign", type=click.Path(dir_okay=False, path_type=Path), help="Sign what is uploaded with the private key of this file.")
@click.option("--unsigned", is_flag=True, help="Upload without a signature; only OPJIT_TRUST=unsigned takes that.")
def push(ops: tuple[str, ...], sign: Path | None, unsigned: bool) -> None:
    """Upload the cache's entries of OPs (default: all) to URL (default: OPJIT_REMOTE), where they are not there yet."""
    from opjit import transfer

    if (sign is None) != unsigned:
        raise click.UsageError("expected --sign KEY (opjit keygen makes one) or --unsigned, so that nobody publishes unsigned by mistake")
    url, names = _url(ops)
    _tell("uploaded", transfer.push(url, sign=sign, ops=names, say=click.echo))


@cache.command()
@click.argument("ops", metavar="[URL] [OP]...", nargs=-1)
def pull(ops: tuple[str, ...]) -> None:
    """Fetch what URL (default: OPJIT_REMOTE) has of OPs (default: all) and the cache has not, for every arch.

    A web server cannot list what it has: from there come the entries that the OPs ask for on this machine.
    """
    from opjit import transfer

    url, names = _url(ops)
    _tell("fetched", transfer.pull(url, ops=names, say=click.echo))


@cache.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("ops", metavar="[OP]...", nargs=-1)
@click.option("--sign", type=click.Path(dir_okay=False, path_type=Path), help="Sign the entries with the private key of this file.")
def pack(file: Path, ops: tuple[str, ...], sign: Path | None) -> None:
    """Write the cache's entries of OPs (default: all) into FILE, a tar that `opjit cache unpack` takes; untarred, it is a remote."""
    from opjit import transfer

    _tell("packed", transfer.pack(file, sign=sign, ops=ops))


@cache.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def unpack(file: Path) -> None:
    """Put the entries of FILE, which `opjit cache pack` wrote, into the cache.

    Where OPJIT_TRUST names keys, one of them must have signed each entry; else FILE must be yours or root's, and nobody else's to write.
    """
    from opjit import transfer

    _tell("unpacked", transfer.unpack(file, say=click.echo))


def _url(words: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """A URL in front, if there is one, and the rest."""
    return (words[0], words[1:]) if words and "://" in words[0] else (None, words)


def _tell(done: str, report: Report) -> None:
    """What a transfer did; exit code 1 if an entry was not in order."""
    for problem in report.problems:
        click.echo(problem, err=True)
    absent = f", {report.absent} not found" if report.absent else ""
    click.echo(f"{done} {len(report.moved)}, {report.there} there already{absent}, {len(report.problems)} left out")
    sys.exit(1 if report.problems else 0)


def _entries(count: int) -> str:
    return f"{count} entr{'y' if count == 1 else 'ies'}"


def _size(count: float) -> str:
    for unit, size in _UNITS:
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def _ago(seconds: float) -> str:
    """How long ago, in one unit; a date ahead of the clock is shown as such."""
    if seconds < -60:
        return "in the future"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"


def _span(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
