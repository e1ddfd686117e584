"""`python -m pgdefer.contrib.cluster`: create a cluster, look at its map, move slots."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from pgdefer.app import App
from pgdefer.cli._base import LONGEST, Exit, fail, no_nan, reported
from pgdefer.contrib.cluster import Cluster

cli = typer.Typer(
    no_args_is_help=True,
    help="Shards: databases that share the jobs by key.",
    rich_markup_mode=None,
)
Dsn = Annotated[str, typer.Option(envvar="PGDEFER_DSN", help="The database of any shard.")]


@contextlib.contextmanager
def _cluster(dsn: str) -> Iterator[Cluster]:
    """Provide a cluster; errors become one line and an exit code."""
    with reported(), contextlib.closing(Cluster(App(), dsn)) as cluster:
        yield cluster


@cli.command()
def create(
    shards: Annotated[list[str], typer.Argument(help="NAME=DSN of each, without passwords.")],
) -> None:
    """Divide the slots among databases, each with the queue. After a failure, run it again."""
    named = dict(shard.partition("=")[::2] for shard in shards)
    if len(named) < len(shards) or not all(named.values()):
        raise typer.BadParameter("give NAME=DSN, each name once")
    with reported():
        Cluster.create(App(), named).close()


@cli.command()
def add(name: str, address: Annotated[str, typer.Argument(metavar="DSN")], dsn: Dsn) -> None:
    """Add a shard without slots, or change the DSN of one."""
    with _cluster(dsn) as cluster:
        unreached = cluster.add(name, address)
    for shard in unreached:
        typer.echo(f"shard {shard} can't be reached: it learns this later, from the others")


@cli.command()
def slots(dsn: Dsn) -> None:
    """Print each shard with its slots."""
    with _cluster(dsn) as cluster:
        cluster.learn()
        known = cluster.map
    owned: dict[str, list[int]] = {name: [] for name in sorted(known.shards)}
    for slot, (owner, _) in enumerate(known.slots):
        owned[owner].append(slot)
    for name, numbers in owned.items():
        ends = [n for n in numbers if n + 1 not in numbers]
        starts = [n for n in numbers if n - 1 not in numbers]
        ranges = [f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, ends, strict=True)]
        typer.echo(f"{name}: {len(numbers)} slots: {', '.join(ranges) or '-'}")


@cli.command()
def dsns(
    dsn: Dsn,
    file: Annotated[Path | None, typer.Argument(help="Where to write them, at once.")] = None,
) -> None:
    """Print the shards' DSNs, for `pgdefer worker --dsns`."""
    with _cluster(dsn) as cluster:
        cluster.learn()
        shards = cluster.map.shards
    text = "".join(f"{shards[name]}\n" for name in sorted(shards))
    if file is None:
        typer.echo(text, nl=False)
        return
    unfinished = file.with_name(f".{file.name}.new")
    try:
        unfinished.write_text(text, "utf-8")
        unfinished.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        fail(Exit.ERROR, f"can't write {file}: {error.strerror}")


@cli.command()
def move(
    slot: int,
    to: str,
    dsn: Dsn,
    patience: Annotated[
        float,
        typer.Option(
            min=0, max=LONGEST, callback=no_nan, help="Seconds to wait for what must end first."
        ),
    ] = 0.5,
    started: Annotated[
        bool, typer.Option("--started", help="Move jobs that wait for a retry, as new ones.")
    ] = False,
) -> None:
    """Move a slot to another shard. After a failure, run it again."""
    with _cluster(dsn) as cluster:
        done = cluster.move(slot, to, patience=patience, started=started)
    typer.echo(f"{done.jobs} jobs moved; the longest pause of a part: {done.longest_pause:.2f} s")
    if done.longest_refusal > 1:
        typer.echo(f"the longest time in which a part refused defers: {done.longest_refusal:.1f} s")
    for part, why in done.stays.items():
        typer.echo(f"part {part} stays for now: {why}")
    raise typer.Exit(0 if done.is_done else 1)


@cli.command()
def stay(slot: int, dsn: Dsn) -> None:
    """Give up the move of a slot, if no part of it has left."""
    with _cluster(dsn) as cluster:
        cluster.stay(slot)


@cli.command()
def check(dsn: Dsn) -> None:
    """Print what is wrong with the map; exit with 1 if anything is."""
    with _cluster(dsn) as cluster:
        wrong = cluster.check()
    for line in wrong:
        typer.echo(line)
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    cli()
