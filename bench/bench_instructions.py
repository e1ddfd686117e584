#!/usr/bin/env python3
"""How many instructions the server needs for each call: the same on a busy machine. Needs valgrind.

    bench/bench_instructions.py [--only TEXT] [--keep FOLDER]

A backend in single-user mode runs the same calls under callgrind, few and many times; the
difference is what one takes once its plans are made. Nothing waits for the disk, the network or
another session. To compare two versions, run it in a checkout of each: 1 % more is more.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psycopg
from common import create_database, install, short, temporary_server

from pgdefer._server import EmbeddedServer

OUTCOMES = """
  set_config('b.outcomes', '[' || coalesce(string_agg('{"id":' || id || ',"claim":' || claim
    || ',"outcome":"succeeded"}', ','), '') || ']', false)
"""
WORKER = "current_setting('b.worker')::bigint"
PREPARE = [
    # the calls below name worker 1
    "select setval('queue.worker_id_seq', 1, false) where not exists (select from queue.worker)",
    "select set_config('b.worker', queue.register_worker('w')::text, false)",
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
]


@dataclasses.dataclass
class Case:
    """Calls of prepared statements, in turn; n is the number of the turn."""

    name: str
    calls: tuple[str, ...]
    # how many turns there are in the two runs
    few: int = 100
    more: int = 400
    # how many jobs a turn is about; how many thousands are deferred before the first
    jobs: int = 1
    filled: int = 0
    # what is called before all
    first: tuple[str, ...] = ()


CASES = [
    Case("defer", ("one({n})",)),
    Case(
        "defer, others have defaults",
        ("one({n})",),
        first=("select queue.register_task('other', '{\"queue\": \"q\"}')",),
    ),
    Case("defer with a lock", ("locked({n})",)),
    Case("defer_many of 1,000, a job", ("many",), 3, 8, jobs=1000),
    Case("defer, claim, finish", ("one({n})", "fetch1", "succeed")),
    Case("fetch(50), outcomes in two calls, a job", ("fetch50", "finish50"), 40, 120, 50, 6),
    Case("in one call, a job", ("both50",), 40, 120, 50, 6),
]


def counted(server: EmbeddedServer, lines: list[str], kept: Path) -> int:
    """Return the instructions of a backend that runs lines on a copy of an idle server's data."""
    data = server.status().data_folder
    with tempfile.TemporaryDirectory(dir=data.parent) as name:
        folder = Path(name)
        shutil.copytree(data, folder / "data", ignore=shutil.ignore_patterns("postmaster.pid"))
        # single-user mode wants each statement on a line of its own
        text = "".join(" ".join(line.split()) + "\n" for line in lines)
        (folder / "in.sql").write_text(text, "utf-8")
        for path in (folder, *folder.rglob("*")):
            shutil.chown(path, data.owner(), data.group())
        with (folder / "in.sql").open("rb") as script:
            done = subprocess.run(
                [
                    *("valgrind", "--tool=callgrind", f"--callgrind-out-file={folder / 'out'}"),
                    *(str(server.bin_dir / "postgres"), "--single", "-D", str(folder / "data")),
                    "ours",
                ],
                capture_output=True,
                text=True,
                check=False,
                **server._as_user() | {"stdin": script},
            )
        found = re.search(r"Collected : (\d+)", done.stderr)
        if found is None or "ERROR" in done.stderr:
            sys.exit(f"the calls failed:\n{done.stderr[-2000:]}")
        shutil.copyfile(folder / "out", kept)
        return int(found[1])


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--keep", type=Path, help="where to leave what callgrind_annotate reads")
    options = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("SKIPPED: there is no valgrind (apt install valgrind)")
        return
    with (
        temporary_server(settings={"autovacuum": "off"}) as server,
        tempfile.TemporaryDirectory() as unwanted,
    ):
        create_database(server, "ours")
        install(server, "ours")
        with psycopg.connect(server.dsn("ours"), autocommit=True) as connection:
            connection.execute("select queue.register_task('noop', '{}')")
            # what idles after it can be copied as it is
            connection.execute("checkpoint")
        folder = options.keep or Path(unwanted)
        folder.mkdir(exist_ok=True)
        print(f"PostgreSQL {server.version}\n\n{'':<42}instructions")
        for case in CASES:
            if options.only in case.name:
                few, more = (
                    counted(
                        server,
                        [*case.first, *PREPARE, *["execute many"] * case.filled, "analyze"]
                        + [f"execute {c.format(n=n)}" for n in range(turns) for c in case.calls],
                        folder / f"{case.name}, {turns}.out",
                    )
                    for turns in (case.few, case.more)
                )
                each = (more - few) / (case.more - case.few) / case.jobs
                print(f"{case.name:<42}{short(each):>12}", flush=True)


if __name__ == "__main__":
    main()
