#!/usr/bin/env python3
"""What each trick of the hot path buys, in instructions: the build with and without it.

    bench/bench_tricks.py [--only TEXT]

Each trick of docs/adr/0008-sql-folders.md is undone in a copy of build/pgdefer.sql by replacing text, and
the same calls are counted on it as on the build (bench_instructions.py). Needs valgrind.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys

import psycopg
from bench_instructions import CASES, SETTINGS, Case, measure
from common import ROOT, create_database, short, temporary_server

BUILD = ROOT / "build" / "pgdefer.sql"


@dataclasses.dataclass
class Trick:
    """A trick: its text in the build, and what stands there without it."""

    name: str
    text: str
    instead: str

    def undo(self, build: str) -> str:
        """Return the build without the trick."""
        if self.text not in build:
            sys.exit(f"{self.name}: the build no longer contains {self.text!r}")
        return build.replace(self.text, self.instead)


DEFER = "returns bigint language plpgsql volatile parallel unsafe security definer{} as $$\n"
BODY = "declare\n  v_id bigint;\n  v_is_awake"
MAY_FINISH = (
    "has_function_privilege(session_user, 'queue.finish_many(jsonb)'::regprocedure, 'execute')"
)
TRICKS = [
    Trick(
        "_unrestricted() immutable",
        "coalesce(v_none, queue._unrestricted())",
        "pg_catalog.to_regclass('queue.unrestricted')",
    ),
    Trick(
        "_installation() immutable",
        "is distinct from queue._installation()",
        "is distinct from to_regclass('queue.installation')::oid::text",
    ),
    Trick(
        "_login_is_no_worker() immutable",
        "or queue._login_is_no_worker()",
        f"or not {MAY_FINISH}",
    ),
    Trick(
        "defer without a search_path",
        DEFER.format("") + BODY,
        DEFER.format("\nset search_path = pg_catalog, pg_temp") + BODY,
    ),
    Trick(
        "one statement in defer",
        "    if pg_catalog.jsonb_contains(defer.args, '{}')",
        "    if false",
    ),
    Trick(
        "a newcomer claimed as it is admitted",
        "  if current_setting('pgdefer.was_dry', true) = 'on'",
        "  if false",
    ),
    Trick("offset 0", " offset 0)", ")"),
]


def count(build: str, cases: list[Case]) -> list[float]:
    """Return the instructions of a turn of each case."""
    with temporary_server(settings=SETTINGS) as server:
        create_database(server, "ours")
        with psycopg.connect(server.dsn("ours"), autocommit=True) as connection:
            connection.execute(build.encode())
            connection.execute("select queue.register_task('noop', '{}')")
            connection.execute("checkpoint")
        found = measure(server, cases, valgrind=True)
    return [count / case.turns / case.jobs for case, (_, count) in zip(cases, found, strict=True)]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="tricks whose name holds this text")
    options = parser.parse_args()
    if shutil.which("valgrind") is None:
        sys.exit("SKIPPED, as there is no valgrind")
    wanted = ("defer, claim, finish", "defer_many of 1,000, a job", "in one call, a job", "defer")
    cases = [
        dataclasses.replace(case, turns=min(case.turns, 40))
        for case in CASES
        if case.name in wanted
    ]
    build = BUILD.read_text("utf-8")
    print(f"{'':<42}" + "".join(f"{case.name:>28}" for case in cases), flush=True)
    base = count(build, cases)
    print(f"{'the build':<42}" + "".join(f"{short(x):>28}" for x in base), flush=True)
    for trick in TRICKS:
        if options.only in trick.name:
            row = count(trick.undo(build), cases)
            print(
                f"{'without: ' + trick.name:<42}"
                + "".join(
                    f"{f'{short(x)} ({x / old - 1:+.1%})':>28}"
                    for x, old in zip(row, base, strict=True)
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
