#!/usr/bin/env python3
"""What each call costs the server in instructions and WAL bytes: the same on a busy machine.

    bench/bench_instructions.py [--only TEXT] [--keep FILE] [--write | --check]

A backend in single-user mode runs the calls: some first, until all plans are made, then those that
count. It runs twice: by itself for the WAL, and under callgrind, if there is valgrind. Nothing
waits for the disk, the network or another session.

Instructions of the C library and other libraries are left out, as these differ between machines;
PostgreSQL's binaries are the embedded server's. --write keeps the figures in bench/costs.json,
--check compares them with that file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psycopg
from common import ROOT, create_database, install, short, temporary_server

from pgdefer.database.embedded import EmbeddedServer

COSTS = ROOT / "bench" / "costs.json"
# A figure that moves further than this is a change of the hot path.
TOLERANCE = 0.02
# What depends on the time is off: cleaning, whole pages after checkpoints, flushes of statistics.
SETTINGS = {"autovacuum": "off", "full_page_writes": "off", "track_counts": "off"}

OUTCOMES = """
  set_config('b.outcomes', '[' || coalesce(string_agg('{"id":' || id || ',"claim":' || claim
    || ',"outcome":"succeeded"}', ','), '') || ']', false)
"""
WORKER = "current_setting('b.worker')::bigint"
PREPARE = [
    # the calls below name worker 1
    "select setval('queue.worker_id_seq', 1, false) where not exists (select from queue.worker)",
    """
    select set_config('b.worker', queue.register_worker('w', info => '{"dead_after": "1 day"}')::text,
      false)
    """,
    "select set_config('b.outcomes', '[]', false)",
    "prepare one(int) as select queue.defer('noop', jsonb_build_object('n', $1))",
    "prepare locked(int) as select queue.defer('noop', jsonb_build_object('n', $1), lock => 'a')",
    """
    prepare many as select count(*) from queue.defer_many((
      select jsonb_agg(jsonb_build_object('task', 'noop', 'args', jsonb_build_object('n', g)))
      from generate_series(1, 1000) g))
    """,
    f"""
    prepare fetch1 as
      select set_config('b.id', id::text, false), set_config('b.claim', claim::text, false)
      from queue.fetch({WORKER})
    """,
    """
    prepare succeed as
      select queue.succeed(current_setting('b.id')::bigint, current_setting('b.claim')::bigint)
    """,
    """
    prepare signal as
      select queue.signal(set_config('b.waits', (current_setting('b.waits')::bigint + 1)::text,
        false)::bigint, 's')
    """,
    """
    prepare look as select set_config('pgdefer.looked_at', '', false),
      set_config('pgdefer.pruned_at', date_part('epoch', clock_timestamp())::text, false)
    """,
    f"prepare fetch50 as select {OUTCOMES} from queue.fetch({WORKER}, null, 50)",
    """
    prepare finish50 as
      select count(*) from queue.finish_many(current_setting('b.outcomes')::jsonb)
    """,
    f"""
    prepare both50 as
      select {OUTCOMES}
      from queue.finish_and_fetch({WORKER}, current_setting('b.outcomes')::jsonb, null, 50)
    """,
    f"prepare sleep as select * from queue.before_sleep({WORKER}, null, '{{\"in_line\": true}}')",
    f"""
    prepare five(text) as
      select {OUTCOMES}
      from queue.finish_and_fetch({WORKER}, current_setting('b.outcomes')::jsonb, array[$1], 5)
    """,
    """
    prepare keyed(text, int) as
      select count(*) from queue.defer_many((
        select jsonb_agg('{"task": "noop"}' || jsonb_build_object('queue', $1)
          || case when g % $2 = 0
            then jsonb_build_object('concurrency_key', $1, 'concurrency_limit', 20) else '{}' end)
        from generate_series(1, 600) g))
    """,
    """
    prepare locks(text) as
      select count(*) from queue.defer_many((
        select jsonb_agg(jsonb_build_object('task', 'noop', 'queue', $1, 'lock', 'l' || g % 100))
        from generate_series(1, 600) g))
    """,
]
# What stands before and after the turns that count: the position in the WAL, and a dump of callgrind's.
MARK = "select pg_current_wal_insert_lsn() as mark"
# Marks are lowered and raised by chance: by the same one in each run, whatever the cases before have done.
SEED = "select setseed(0.5)"


@dataclasses.dataclass
class Case:
    """Calls of prepared statements, in turn; n is the number of the turn."""

    name: str
    calls: tuple[str, ...]
    # turns that make plans, then those that count; how many jobs a turn is about
    warm: int = 12
    turns: int = 40
    jobs: int = 1
    # what is called before all
    first: tuple[str, ...] = ()
    # counted under valgrind, too
    is_short: bool = True

    def lines(self) -> list[str]:
        """Return the statements: a mark, turns, a mark."""
        warm, turns = (
            [f"execute {call.format(n=n)}" for n in range(count) for call in self.calls]
            for count in (self.warm, self.turns)
        )
        return [SEED, *self.first, *warm, SEED, MARK, *turns, MARK]


# A claim looks for new jobs if the last look was 10 ms ago, and for jobs to remove if that was a minute ago.
# So that the machine's speed changes nothing, all are admitted before, each call of a batch looks, and none
# removes.
# One tick admits for a second, which is not enough for all of them under valgrind.
ADMIT = ("select queue.tick()",) * 8
# Jobs that wait for a signal; b.waits is before the next one.
SUSPEND = (
    """
    select set_config('b.waits', (min(d) - 1)::text, false)
    from queue.defer_many((select jsonb_agg('{"task": "noop"}'::jsonb) from generate_series(1, 60))) d
    """,
    *[f"select count(queue.wait(f.id, f.claim, 'w', 's')) from queue.fetch({WORKER}, null, 60) f"]
    * 3,
    *ADMIT,
)
# A table whose rows defer jobs.
TRIGGER = (
    "create table traced (n integer)",
    """
    create trigger d after insert on traced for each row execute function queue.defer_trigger('noop')
    """,
    "prepare rows as insert into traced select g from generate_series(1, 1000) g",
)
NONE = "select set_config('b.outcomes', '[]', false)"
# One after another in one queue: those that want it empty first; the batches drain what was deferred before.
CASES = [
    Case("defer, claim, finish", ("one({n})", "fetch1", "succeed"), turns=100),
    Case("asking to sleep", ("sleep",)),
    Case("signal, claim, finish", ("signal", "fetch1", "succeed"), 15, 40, first=SUSPEND),
    Case("defer_many of 1,000, a job", ("many",), 2, 2, jobs=1000),
    Case(
        "fetch(50), outcomes in two calls, a job",
        ("look", "fetch50", "finish50"),
        12,
        20,
        50,
        first=ADMIT,
    ),
    Case("in one call, a job", ("look", "both50"), 10, 20, 50, first=(NONE,)),
    Case(
        "deferred in thousands and run, a job",
        ("many", *["look", "both50"] * 21),
        2,
        5,
        1000,
        first=("execute both50",) * 20,
        is_short=False,
    ),
    Case("defer", ("one({n})",), turns=400),
    Case(
        "defer, others have defaults",
        ("one({n})",),
        turns=400,
        first=("select queue.register_task('other', '{\"queue\": \"q\"}')",),
    ),
    Case("defer with a lock", ("locked({n})",), turns=400),
    *(
        Case(
            f"in batches of five{name}, a job",
            ("look", f"five('{queue}')"),
            20,
            80,
            5,
            first=(NONE, f"execute {fill}", *ADMIT),
        )
        # the second number says which of the jobs have a key
        for name, queue, fill in (
            ("", "plain", "keyed('plain', 1000)"),
            (", half with a key", "mixed", "keyed('mixed', 2)"),
            (" with a key, limit 20", "keyed", "keyed('keyed', 1)"),
            (" with 100 locks", "locked", "locks('locked')"),
        )
    ),
    Case("a row of a trigger, of 1,000", ("rows",), 2, 2, jobs=1000, first=TRIGGER),
]


@dataclasses.dataclass
class Cost:
    """What a job of a case costs."""

    name: str
    wal: float
    instructions: float | None = None

    def figures(self) -> dict[str, float]:
        """Return what was measured, by its unit."""
        figures = {"WAL bytes": round(self.wal, 1)}
        if self.instructions is not None:
            figures["instructions"] = round(self.instructions)
        return figures


def run(server: EmbeddedServer, lines: Sequence[str], folder: Path, before: Sequence[str]) -> str:
    """Run statements in a single-user backend on a copy of the data of an idle server."""
    data = server.status().data_folder
    shutil.copytree(data, folder / "data", ignore=shutil.ignore_patterns("postmaster.pid"))
    # single-user mode wants each statement on a line of its own
    (folder / "in.sql").write_text("".join(" ".join(x.split()) + "\n" for x in lines), "utf-8")
    for path in (folder, *folder.rglob("*")):
        shutil.chown(path, data.owner(), data.group())
    program = [str(server.bin_dir / "postgres"), "--single", "-D", str(folder / "data"), "ours"]
    with (folder / "in.sql").open("rb") as script:
        done = subprocess.run(
            [*before, *program],
            capture_output=True,
            text=True,
            check=False,
            **server._as_user() | {"stdin": script},
        )
    if done.returncode or "ERROR" in done.stderr:
        sys.exit(f"the calls failed:\n{done.stderr[-2000:]}")
    output: str = done.stdout
    return output


def positions(output: str) -> list[int]:
    """Return the WAL positions at the marks."""
    found = re.findall(r'mark = "(\w+)/(\w+)"', output)
    return [int(high, 16) << 32 | int(low, 16) for high, low in found]


def instructions(dump: Path) -> int:
    """Return the instructions of PostgreSQL's own objects in a dump of callgrind's."""
    total = 0
    is_ours = is_call = False
    names: dict[str, str] = {}
    for line in dump.read_text("utf-8").splitlines():
        if line.startswith(("ob=", "cob=")):
            # a name is written out where it comes first
            key, _, name = line.partition("=")[2].partition(" ")
            names[key] = name or names[key]
            if line.startswith("ob="):
                is_ours = not re.search(r"/(?:ld|lib)[^/]*\.so", names[key])
        elif line.startswith("calls="):
            is_call = True
        elif line[:1].isdigit() or line[:1] in "+-*":
            # what a call took, on the line after it, is counted where it was spent; zeros are left out
            total += sum(map(int, line.split()[1:])) if is_ours and not is_call else 0
            is_call = False
    return total


def measure(
    server: EmbeddedServer,
    cases: Iterable[Case] = CASES,
    *,
    valgrind: bool = False,
    kept: Path | None = None,
) -> list[tuple[int, int]]:
    """Return the WAL bytes and, under valgrind, the instructions of each case."""
    cases = list(cases)
    lines = [*PREPARE, "analyze", *(line for c in cases for line in c.lines())]
    with tempfile.TemporaryDirectory(dir=server.status().data_folder.parent) as name:
        folder = Path(name)
        before = [
            *("valgrind", "--tool=callgrind", f"--callgrind-out-file={folder / 'out'}"),
            "--dump-before=pg_current_wal_insert_lsn",
        ]
        at = positions(run(server, lines, folder, before if valgrind else []))
        dumps = [folder / f"out.{n + 1}" for n in range(len(at))]
        counts = [instructions(dump) if valgrind else 0 for dump in dumps]
        for n, case in enumerate(cases if kept and valgrind else []):
            assert kept is not None
            kept.mkdir(exist_ok=True)
            shutil.copyfile(dumps[2 * n + 1], kept / f"{case.name}.out")
    return [(at[n + 1] - at[n], counts[n + 1]) for n in range(0, len(at), 2)]


def costs(*, valgrind: bool, only: str = "", kept: Path | None = None) -> list[Cost]:
    """Return what all cases cost on a new server."""
    with temporary_server(settings=SETTINGS) as server:
        create_database(server, "ours")
        install(server, "ours")
        with psycopg.connect(server.dsn("ours"), autocommit=True) as connection:
            connection.execute("select queue.register_task('noop', '{}')")
            # what idles after it can be copied as it is
            connection.execute("checkpoint")
        found = [
            Cost(case.name, wal / case.turns / case.jobs)
            for case, (wal, _) in zip(CASES, measure(server), strict=True)
        ]
        if valgrind:
            cases = [case for case in CASES if case.is_short]
            counted = measure(server, cases, valgrind=True, kept=kept)
            by_name = {cost.name: cost for cost in found}
            for case, (_, count) in zip(cases, counted, strict=True):
                by_name[case.name].instructions = count / case.turns / case.jobs
    return [cost for cost in found if only in cost.name]


def differences(found: Iterable[Cost], kept: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return which figures are not those kept, as lines."""
    lines = []
    for cost in found:
        for unit, value in cost.figures().items():
            before = kept.get(cost.name, {}).get(unit)
            if before is None:
                lines.append(f"{cost.name}: {value:,.1f} {unit}, none kept")
            elif abs(value - before) > TOLERANCE * before:
                lines.append(f"{cost.name}: {value:,.1f} {unit}, before {before:,.1f}")
    return lines


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--wal", action="store_true", help="leave the instructions out")
    parser.add_argument("--keep", type=Path, help="where to leave what callgrind_annotate reads")
    parser.add_argument("--write", action="store_true", help=f"keep the figures in {COSTS.name}")
    parser.add_argument(
        "--check", action="store_true", help=f"exit 1 if one differs from {COSTS.name} by 2 %%"
    )
    options = parser.parse_args()
    valgrind = not options.wal and shutil.which("valgrind") is not None
    if not valgrind:
        print("SKIPPED: instructions" + ("" if options.wal else ", as there is no valgrind"))
    kept = json.loads(COSTS.read_text("utf-8")) if COSTS.exists() else {}
    print(f"{'a job':<42}{'instructions':>12}{'WAL bytes':>12}")
    found = costs(valgrind=valgrind, only=options.only, kept=options.keep)
    for cost in found:
        count = "" if cost.instructions is None else short(cost.instructions)
        print(f"{cost.name:<42}{count:>12}{cost.wal:>12.1f}", flush=True)
    if options.write:
        figures = {cost.name: kept.get(cost.name, {}) | cost.figures() for cost in found}
        COSTS.write_text(json.dumps(kept | figures, indent=2) + "\n", "utf-8")
    if options.check and (missed := differences(found, kept)):
        sys.exit("\n".join(["", f"Other than in {COSTS.name} (--write keeps them):", *missed]))


if __name__ == "__main__":
    main()
