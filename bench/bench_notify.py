#!/usr/bin/env python3
"""The cost of waking workers for producers, and how much of it the sleep lock saves.

    bench/bench_notify.py [--runs N] [--only TEXT] [--seconds N] [--pin]

NOTIFY takes a lock of the whole cluster until its transaction has been committed, so transactions
that notify commit one after the other: the slower the disk, the worse. With the sleep lock a deferring
transaction notifies only while a worker sleeps. Each line is a number of clients that defer one job
in each transaction. The columns are:

  off       SET pgdefer.notify = off: the rate of the INSERT alone
  busy      no worker sleeps: defer tries the sleep lock, and notifies nobody
  working   a real worker takes the jobs meanwhile, and sleeps whenever it finds none
  asleep    a worker sleeps that nothing wakes (it is frozen): every transaction notifies
  always    NOTIFY in every transaction, as without the sleep lock

commit_delay makes commits slow, as a slow disk or a slow standby would.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from common import Bench, arguments, bench, short

WORKER = Path(__file__).resolve().parent / "workers" / "run_pgdefer.py"
RANDOM = "\\set n random(1, 1000000)\n"
DEFER = f"{RANDOM}select queue.defer('noop', jsonb_build_object('n', :n::int))"
ALWAYS = f"{DEFER}, pg_notify('pgdefer', '')"

VARIANTS = ("off", "busy", "working", "asleep", "always")
CLIENTS = (1, 8, 32)
DELAYS = (0, 1, 2)


@contextlib.contextmanager
def worker_of(on: Bench, database: str, variant: str) -> Iterator[None]:
    """Run the worker of the variant."""
    if variant == "asleep":
        with on.connect(database) as connection:
            connection.execute(
                "select s.* from queue.register_worker('frozen') w (id), queue.before_sleep(w.id) s"
            )
            yield
    elif variant == "working":
        command = [*on.client_prefix(), sys.executable, WORKER, on.server.dsn(database)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            worker.stdout.readline()
            yield
            worker.terminate()
    else:
        yield


def run(on: Bench, variant: str, clients: int, delay: int, seconds: int) -> float:
    options = f"-c commit_delay={1000 * delay} -c commit_siblings=0"
    if variant == "off":
        options += " -c pgdefer.notify=off"
    with on.fresh("ours") as database:
        on.settle(database)
        with worker_of(on, database, variant):
            return on.pgbench(
                database,
                ALWAYS if variant == "always" else DEFER,
                clients=clients,
                seconds=seconds,
                options=options,
            )


def main() -> None:
    parser = arguments(__doc__, runs=3)
    parser.add_argument("--seconds", type=int, default=2, help="of each run (2)")
    options = parser.parse_args()
    with bench(options) as on:
        print(
            f"{'jobs/s, median of ' + str(options.runs):<34}" + "".join(f"{v:>9}" for v in VARIANTS)
        )
        for delay in DELAYS:
            for clients in CLIENTS:
                name = f"{clients} client{'s' if clients > 1 else ''}, " + (
                    f"commits of {delay} ms and more" if delay else "this disk"
                )
                if options.only not in name:
                    continue
                rates: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
                for _ in range(options.runs):
                    for variant, found in rates.items():
                        found.append(run(on, variant, clients, delay, options.seconds))
                cells = (short(statistics.median(found)) for found in rates.values())
                print(f"{name:<34}" + "".join(f"{cell:>9}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
