#!/usr/bin/env python3
"""The time and size of each page of the web page with a million jobs, and what ten open pages cost.

    bench/bench_page.py [--jobs N] [--runs N] [--only TEXT] [--seconds N] [--check]

Databases with N jobs that have ended, are ready, or wait behind 10,000 locks. A client in this process
asks for each page, so no network takes part. The page keeps the figures that count all jobs: of Now,
Locks and Tasks, the first answer computes them, and has a line of its own without a limit.
"""

from __future__ import annotations

import statistics
import threading
import time

from bench_operations import fill
from common import Bench, Report, arguments, bench, cpu, processes_of
from starlette.testclient import TestClient

from pgdefer.contrib import web

LIMIT = 200.0  # ms
SIZE = 150.0  # kB
SHARE = 3.0  # % of a core, for ten open pages
OPEN = 10
REFRESH = 5.0  # s between two refreshes of Now
STATES = ("ready", "running", "held", "waiting", "blocked", "succeeded", "failed", "cancelled")


def pages(middle: int) -> dict[str, str]:
    """Return the pages, by name."""
    found = {
        "now": "/",
        "jobs": "/jobs",
        "jobs, from the middle": f"/jobs?before={middle}",
        "a job": f"/jobs/{middle}",
        "a graph": f"/jobs/{middle}/graph",
        "jobs, a text": "/jobs?pattern=name",
        "jobs, a text in vain": "/jobs?pattern=nowhere",
        "jobs, a jsonpath in vain": "/jobs?by=path&pattern=$.n ? (@ < 0)",
        "jobs, a key": "/jobs?by=key&pattern=lock 7",
        "jobs of a queue": "/jobs?queue=q1",
        "jobs of a queue in vain": "/jobs?queue=nowhere",
        "jobs deferred in a time": "/jobs?from=2020-01-01T00:00&to=2999-01-01T00:00",
        "jobs deferred in a time in vain": "/jobs?to=2020-01-01T00:00&zone=Europe/Berlin",
        "jobs finished in a time in vain": "/jobs?at=finished&from=2999-01-01T00:00",
        "jobs scheduled in a time in vain": "/jobs?at=scheduled&from=2999-01-01T00:00&state=ready",
    }
    found |= {f"jobs, {state}": f"/jobs?state={state}" for state in STATES}
    return found | {
        name: f"/{name}" for name in ("queues", "locks", "workers", "schedules", "tasks", "audit")
    }


def page_of(on: Bench, database: str) -> web.Page:
    """Return the page of a database."""
    return web.asgi(on.server.dsn(database), needs_password=False)


def visitor(page: web.Page) -> TestClient:
    """Return a client that has logged in."""
    client = TestClient(page)
    token = client.get("/login").text.partition('name="token" value="')[2].partition('"')[0]
    client.post("/login", data={"role": "postgres", "password": "any", "token": token})
    return client


def measure(client: TestClient, url: str, runs: int) -> tuple[float, float, float]:
    """Return the time of the first answer, the median of the next ones (ms), and the size (kB)."""
    times = []
    for _ in range(runs + 1):
        begun = time.perf_counter()
        answer = client.get(url)
        times.append((time.perf_counter() - begun) * 1000)
        assert answer.status_code == 200, (url, answer.status_code)
    return times[0], statistics.median(times[1:]), len(answer.content) / 1000


def share_of_open_pages(on: Bench, database: str, seconds: float) -> float:
    """Return the percentage of a core that the server takes for open pages that refresh."""
    page = page_of(on, database)
    clients = [visitor(page) for _ in range(OPEN)]
    for client in clients:
        client.get("/")
    server = on.server.status().pid
    assert server is not None
    pids = processes_of(server)
    before = cpu(pids)

    def refresh(client: TestClient, number: int) -> None:
        ends = time.monotonic() + seconds
        time.sleep(REFRESH * number / OPEN)
        while time.monotonic() < ends:
            client.get("/")
            time.sleep(REFRESH)

    threads = [threading.Thread(target=refresh, args=(c, n)) for n, c in enumerate(clients)]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 100 * (cpu(pids) - before) / (time.monotonic() - begun)


def main() -> None:
    parser = arguments(__doc__, runs=5)
    parser.add_argument("--jobs", type=int, default=1_000_000, help="in each database (1,000,000)")
    parser.add_argument("--seconds", type=float, default=60, help="with ten open pages (60)")
    options = parser.parse_args()
    report = Report()
    with bench(options) as on:
        for kind in ("finished", "ready", "locked"):
            with on.fresh("ours") as name:
                begun = time.perf_counter()
                with on.connect(name) as filling:
                    fill(filling, kind, options.jobs)
                print(f"\n{options.jobs} jobs {kind}, made in {time.perf_counter() - begun:.0f} s")
                with visitor(page_of(on, name)) as client:
                    for page, url in pages(options.jobs // 2).items():
                        if options.only in f"{kind}: {page}":
                            first, took, size = measure(client, url, options.runs)
                            report.below(f"{kind}: {page}", took, LIMIT, "ms")
                            report.below("", size, SIZE, "kB")
                            if first > LIMIT:
                                print(f"{'':<34}{first:>10.0f} ms: the first answer")
                    if options.only in f"{kind}: ten open pages":
                        share = share_of_open_pages(on, name, options.seconds)
                        report.below(f"{kind}: ten open pages", share, SHARE, "% of a core")
    report.end(options)


if __name__ == "__main__":
    main()
