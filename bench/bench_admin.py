#!/usr/bin/env python3
"""The time of each page of Django's admin with a million jobs, and of its slowest statement.

    bench/bench_admin.py [--jobs N] [--runs N] [--only TEXT] [--check]

Databases with N jobs that have ended, are ready, or wait behind 10,000 locks. Django's test client
asks for each page. The time is what the page takes without the network and without waiting for a
core: that of its statements, and the processor's time in Python.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Any

from common import ROOT, Bench, Report, arguments, bench

sys.path.insert(0, str(ROOT / "examples" / "django_shop"))
os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"

import django

django.setup()

from bench_operations import fill  # noqa: E402
from django.contrib.auth import get_user_model  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.db import connection, connections  # noqa: E402
from django.test import Client  # noqa: E402
from django.test.utils import CaptureQueriesContext  # noqa: E402

LIMIT = 500.0
STATEMENTS = 20
JOBS = "/admin/pgdefer/job/"
STATES = ("ready", "running", "held", "waiting", "blocked", "succeeded", "failed", "cancelled")


def pages(middle: int) -> dict[str, str]:
    """Return the pages, by name."""
    found = {
        "front page": "/admin/",
        "jobs": JOBS,
        "jobs, from the middle": f"{JOBS}?before={middle}",
        "a job": f"{JOBS}{middle}/change/",
        "jobs, an id": f"{JOBS}?q={middle}",
        "jobs, a text": f"{JOBS}?q=name",
        "jobs, a text in vain": f"{JOBS}?q=nowhere",
        "jobs, a jsonpath in vain": f"{JOBS}?q=$.n ? (@ < 0)",
        "jobs, a key": f"{JOBS}?q=key:lock 7",
        "jobs of a queue": f"{JOBS}?queue=q1",
        "jobs of a task": f"{JOBS}?task=task 1",
        "jobs of a queue in vain": f"{JOBS}?queue=nowhere",
    }
    found |= {f"jobs, {state}": f"{JOBS}?state={state}" for state in STATES}
    lists = ("queue", "task", "schedule", "worker", "lock", "semaphore")
    return found | {f"{name}s": f"/admin/pgdefer/{name}/" for name in lists}


def use(run: Bench, name: str) -> Client:
    """Have Django use a database; return a client that has logged in."""
    place = {"HOST": str(run.server.socket_folder), "USER": "postgres", "NAME": name}
    connections.close_all()
    connections.settings["default"].update(place)
    call_command("migrate", verbosity=0)
    client = Client()
    client.force_login(get_user_model().objects.create_superuser("admin"))
    return client


def measure(client: Client, url: str, runs: int) -> tuple[float, int, float, str]:
    """Return the median time of a page; how many statements it has; the slowest one."""
    whole: list[float] = []
    each: list[tuple[float, str]] = []
    for _ in range(runs + 1):
        with CaptureQueriesContext(connection) as queries:
            begun = time.process_time()
            answer: Any = client.get(url)
            python = (time.process_time() - begun) * 1000
        assert answer.status_code == 200, (url, answer.status_code)
        each = [(float(query["time"]) * 1000, str(query["sql"])) for query in queries]
        whole.append(python + sum(took for took, _ in each))
    # The first answer also compiles templates.
    slowest, text = max(each)
    return statistics.median(whole[1:]), len(each), slowest, " ".join(text.split())


def main() -> None:
    parser = arguments(__doc__, runs=3)
    parser.add_argument("--jobs", type=int, default=1_000_000, help="in each database (1,000,000)")
    options = parser.parse_args()
    report = Report()
    with bench(options) as run:
        for kind in ("finished", "ready", "locked"):
            with run.fresh("ours") as name:
                begun = time.perf_counter()
                with run.connect(name) as filling:
                    fill(filling, kind, options.jobs)
                print(f"\n{options.jobs} jobs {kind}, made in {time.perf_counter() - begun:.0f} s")
                client = use(run, name)
                for page, url in pages(options.jobs // 2).items():
                    if options.only in f"{kind}: {page}":
                        took, statements, slowest, text = measure(client, url, options.runs)
                        report.below(f"{kind}: {page}", took, LIMIT, "ms")
                        report.below("", statements, STATEMENTS, "statements")
                        if took > LIMIT / 2:
                            print(f"{'':<34}{slowest:>10.0f} ms: {text[:120]}", flush=True)
                connections.close_all()
    report.end(options)


if __name__ == "__main__":
    main()
