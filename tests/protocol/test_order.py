"""The order of jobs, which SQL decides and no worker may change."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg.types.json import Jsonb

# The worker that cases share does not serve the others' queues.
SERVES = ["wide", "paused", "another"]


@pytest.fixture(scope="module")
def single(shared: Any) -> Any:
    """A worker that runs one job at a time, of the queues `single` and `part/*`."""
    shared.single = shared.start("single", "part/*", CONCURRENCY=1)
    return shared


def begun(lab: Any, *ids: int) -> list[int]:
    """Return the jobs in the order in which the single worker started them, once all have ended."""
    lab.end(*ids)
    for id in ids:
        lab.single.wait("started", id)
    return [id for id in lab.single.started() if id in ids]


@pytest.fixture
def blocker(single: Any) -> Any:
    """Keeps the single worker busy, so that jobs deferred meanwhile are ordered; call to end."""
    id, path = single.hold(queue="single")
    single.reach(id, "running")

    def end() -> None:
        single.conn.execute("select queue.tick()")  # admits them all, before the worker fetches
        path.touch()
        single.end(id)

    yield end
    path.touch()


def test_oldest_first(single: Any, blocker: Any) -> None:
    ids = [single.defer("echo", queue="single") for _ in range(5)]
    blocker()
    assert begun(single, *ids) == ids


def test_priority_first(single: Any, blocker: Any) -> None:
    low, middle, high = (single.defer("echo", queue="single", priority=n) for n in (-5, 0, 7))
    blocker()
    assert begun(single, low, middle, high) == [high, middle, low]


def test_nearest_deadline_first(single: Any, blocker: Any) -> None:
    none, late, soon = (
        single.defer("echo", queue="single", deadline=deadline)
        for deadline in (None, "2100-01-01", "2099-01-01")
    )
    blocker()
    assert begun(single, none, late, soon) == [soon, late, none]


def test_lock_in_order(single: Any, blocker: Any) -> None:
    ids = [single.defer("echo", queue="single", lock="a", priority=n) for n in range(4)]
    blocker()
    assert begun(single, *ids) == ids


def test_pattern(single: Any) -> None:
    assert begun(single, id := single.defer("echo", queue="part/of it")) == [id]


def test_only_its_queues(single: Any) -> None:
    """The single worker is idle, and leaves jobs of other queues to the other one."""
    (job,) = single.end(single.defer("echo", queue="another"))
    assert job["id"] not in single.single.started()


def test_concurrency(shared: Any) -> None:
    """Four at once, the fifth once one of them has ended."""
    jobs = [shared.hold(queue="wide") for _ in range(5)]
    for id, _ in jobs[:4]:
        shared.reach(id, "running")
    assert shared.job(jobs[4][0])["state"] == "ready"
    jobs[2][1].touch()
    shared.reach(jobs[4][0], "running")
    for _, path in jobs:
        path.touch()
    shared.end(*[id for id, _ in jobs])


def test_concurrency_key(shared: Any) -> None:
    given = {"concurrency_key": "k", "concurrency_limit": 1, "queue": "wide"}
    first, second = shared.hold(**given), shared.hold(**given)
    shared.reach(first[0], "running")
    assert shared.reach(second[0], "blocked")
    first[1].touch()
    shared.reach(second[0], "running")
    second[1].touch()
    shared.end(first[0], second[0])


def test_paused_queue(shared: Any) -> None:
    shared.conn.execute("select queue.pause('paused')")
    id = shared.defer("echo", queue="paused")
    shared.end(shared.defer("echo", queue="wide"))
    assert shared.job(id)["state"] == "ready"
    shared.conn.execute("select queue.resume('paused')")
    shared.end(id)


def test_needs(shared: Any) -> None:
    id, path = shared.hold(queue="wide")
    child = shared.defer("echo", queue="wide", needs=[id])
    shared.reach(id, "running")
    assert shared.job(child)["state"] == "waiting"
    path.touch()
    job = shared.end(child)[0]
    assert job["started_at"] >= shared.job(id)["finished_at"]


def test_scheduled(shared: Any) -> None:
    id = shared.defer("echo", queue="wide", options={"delay": "1 second"})
    job = shared.end(id)[0]
    assert job["started_at"] >= job["scheduled_at"]


def test_held(shared: Any) -> None:
    id = shared.defer("echo", queue="wide", options={"held": True})
    shared.end(shared.defer("echo", queue="wide"))
    assert shared.job(id)["state"] == "held"
    shared.conn.execute("select queue.unhold(%s)", [id])
    shared.end(id)


def test_many(shared: Any) -> None:
    jobs = Jsonb([{"task": "none", "queue": "wide"}] * 60)
    ids = [id for (id,) in shared.conn.execute("select * from queue.defer_many(%s)", [jobs])]
    assert {job["state"] for job in shared.end(*ids)} == {"succeeded"}
    assert {job["claims"] for job in shared.end(*ids)} == {1}
