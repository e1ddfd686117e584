"""The options of a worker.

Tests: integration/test_worker_choice.py, integration/test_wrong_usages.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypedDict

from pgdefer.checks import MAX_INTEGER, check_flag, check_number, check_text
from pgdefer.worker.probes import parse_address

__all__ = [
    "DEAD_AFTER",
    "HEARTBEAT_EVERY",
    "JOBS_PER_PROCESS",
    "WorkerOptions",
    "check_options",
]

# The defaults of the options of these names; the first two are in seconds.
HEARTBEAT_EVERY = 10.0
DEAD_AFTER = 30.0
JOBS_PER_PROCESS = 100
# The options that are numbers: their types, and the least and greatest values.
NUMBERS: dict[str, tuple[Any, float, float]] = {
    **dict.fromkeys(("concurrency", "jobs_per_process", "max_jobs"), (int, 1, MAX_INTEGER)),
    "prefetch": (int, 0, MAX_INTEGER),
    **dict.fromkeys(
        ("shutdown_timeout", "heartbeat_every", "dead_after"), ((int, float), 0, MAX_INTEGER)
    ),
    "poll_every": ((int, float), 0.01, 60),
}
# The numbers that may be None.
OPTIONAL = frozenset({"max_jobs", "shutdown_timeout", "poll_every"})
FLAGS = frozenset({"drain", "prune_schedules", "register_schedules"})


class WorkerOptions(TypedDict, total=False):
    """The options of `Worker` besides the queues.

    `concurrency`: how many jobs run at once (20). In place of it, `slots`: a list of `N`, or
    `N:HORIZON` for N slots that take only jobs whose deadline is nearer than the horizon, such as
    5s, 30m, 2h, 1d or 1w: `slots=["2:30m", 3]`.

    `order`: with `listed`, the order of the list of queues goes before priority: no job of a later
    queue starts while an earlier queue has one that may start. It needs a list of queues. `tasks`:
    run only jobs of these tasks. `max_running={"reports": 2, "tenant*": 1}`: this worker runs at
    most so many jobs of each such queue at once; the longest pattern applies.

    `prefetch`: how many jobs the worker may claim before a slot is free for them (500; with many
    databases, 100 of each; 0: none). It claims only as many as start within about 50 ms, and only
    jobs without a limit. It gives them back when it stops, at a pause, and after 200 ms.

    `shutdown_timeout`: how many seconds running jobs may take to end after `stop`; None, the
    default, means no limit. `drain`: exit when no job is left that would start by itself, according
    to `queue.before_sleep`. `max_jobs`: exit after this many jobs, so that a supervisor starts a
    new process before a handler's leaks fill the memory.

    `heartbeat_every`: the seconds between heartbeats (10). `dead_after`: the seconds of silence
    after which others get the worker's jobs (30). `poll_every`: the most seconds that an idle
    worker sleeps before it asks the database; None, the default, means as long as
    `queue.before_sleep` says. Set it where notifications do not arrive. `jobs_per_process`: replace
    a child process after this many jobs (100). `prune_schedules`: remove the schedules that this
    app has registered before and no longer has. `register_schedules=False`: register no schedules,
    as in tests. `http="127.0.0.1:9000"`: the address that answers /healthz, /readyz and /metrics.
    """

    concurrency: int
    slots: Sequence[int | str]
    order: Literal["mixed", "listed"]
    tasks: Sequence[str] | None
    prefetch: int
    max_running: Mapping[str, int] | None
    name: str | None
    shutdown_timeout: float | None
    drain: bool
    max_jobs: int | None
    heartbeat_every: float
    dead_after: float
    poll_every: float | None
    jobs_per_process: int
    prune_schedules: bool
    register_schedules: bool
    http: str | None


def check_options(options: WorkerOptions) -> None:
    """Raise TypeError for an unknown option, ValueError for a value out of range."""
    known = WorkerOptions.__annotations__
    if unknown := ", ".join(sorted(options.keys() - known.keys())):
        raise TypeError(f"a worker takes no option {unknown}: it takes queues, {', '.join(known)}")
    if "slots" in options and "concurrency" in options:
        raise ValueError("give slots or concurrency, not both")
    if options.get("order", "mixed") not in ("mixed", "listed"):
        raise ValueError(f"order is mixed or listed, not {options['order']!r}")
    tasks = options.get("tasks")
    if isinstance(tasks, Collection) and not tasks:
        raise ValueError("tasks is empty: leave it out to run all")
    _check_values(options)
    beat = options.get("heartbeat_every", HEARTBEAT_EVERY)
    dead = options.get("dead_after", DEAD_AFTER)
    if not 0 < beat < dead:
        raise ValueError(
            f"heartbeat_every must be above 0 and below dead_after: {beat:g} and {dead:g}"
        )


def _check_values(options: WorkerOptions) -> None:
    for name in options.keys() & NUMBERS.keys():
        kind, least, greatest = NUMBERS[name]
        value: Any = options.get(name)
        if value is not None or name not in OPTIONAL:
            check_number(name, value, kind, at_least=least, at_most=greatest)
    for name in options.keys() & FLAGS:
        check_flag(name, options.get(name))
    most = options.get("max_running") or {}
    if not isinstance(most, Mapping):
        raise TypeError(f'max_running must be a mapping such as {{"reports": 2}}, not {most!r}')
    for queue, limit in most.items():
        check_text("each queue of max_running", queue, "reports")
        check_number(f"max_running of {queue!r}", limit, int, at_least=1)
    if given := options.get("name"):
        check_text("name", given, "mail-1")
    if (address := options.get("http")) is not None:
        check_text("http", address, "127.0.0.1:9000")
        parse_address(address)
