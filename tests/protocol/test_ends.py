"""How workers end, and the state that they leave."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from .conftest import wait_for

LIVE = "select count(*) from queue.workers where is_alive"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop(lab: Any, number: signal.Signals) -> None:
    """It claims no more, lets running jobs end, sends heartbeats until then, and deregisters."""
    worker = lab.start()
    id, path = lab.hold()
    wait_for((lab.folder / "file0.began").exists)  # else a worker may give it back
    worker.send(number)
    worker.wait("stopping")
    left = lab.defer("echo")
    lab.heartbeat()
    path.touch()
    assert worker.ended() == 0, worker.log()
    assert lab.job(id)["state"] == "succeeded"
    assert (lab.job(left)["state"], lab.job(left)["attempts"]) == ("ready", 0)
    assert lab.value(LIVE) == 0


def test_stop_while_idle(lab: Any) -> None:
    worker = lab.start()
    lab.end(lab.defer("echo"))
    assert worker.stop() == 0, worker.log()
    assert worker.events[-1]["event"] == "ended"
    assert lab.value(LIVE) == 0


@pytest.mark.parametrize("numbers", [[signal.SIGTERM] * 2, [signal.SIGQUIT]], ids=["twice", "quit"])
def test_stop_at_once(lab: Any, numbers: list[signal.Signals]) -> None:
    """Running jobs are aborted and given back, as if never claimed."""
    worker = lab.start()
    id, _ = lab.hold()
    wait_for((lab.folder / "file0.began").exists)
    for number in numbers:
        worker.send(number)
        worker.wait("stopping")
    assert worker.ended() in {0, 8}, worker.log()
    job = lab.job(id)
    assert (job["state"], job["attempts"], job["crashes"]) == ("ready", 0, 0)
    assert lab.attempts(id) == ["released"]
    assert lab.value(LIVE) == 0


def test_drain(lab: Any) -> None:
    """It exits once no job is left that would start by itself, including retries."""
    retry = {"max_attempts": 2, "base": "300 ms"}
    ids = [lab.defer("echo") for _ in range(10)]
    ids.append(lab.defer("echo", needs=ids[:3]))
    ids.append(lab.defer("again", {"path": lab.path()}))
    ids += [lab.defer("echo", lock="a") for _ in range(3)]
    failing = lab.defer("fail", {"message": "bad"}, options={"retry": retry})
    later = lab.defer("echo", options={"delay": "1 hour"})
    worker = lab.start(DRAIN=1)
    assert worker.ended() == 0, worker.log()
    assert {lab.job(id)["state"] for id in ids} == {"succeeded"}
    assert lab.job(failing)["attempts"] >= 1
    assert lab.job(later)["state"] == "scheduled"
    assert lab.value(LIVE) == 0


def test_drain_of_nothing(lab: Any) -> None:
    assert lab.start(DRAIN=1).ended() == 0


def test_killed(lab: Any) -> None:
    """Its job crashed with it. The next worker finds that out, and runs the job again."""
    worker = lab.start(DEAD_AFTER=2)
    id, path = lab.hold()
    lab.reach(id, "running")
    worker.kill()
    path.touch()
    lab.start()
    job = lab.end(id)[0]
    assert (job["state"], job["crashes"]) == ("succeeded", 1)
    assert lab.attempts(id) == ["crashed"]


def test_crash(lab: Any) -> None:
    """The job that kills its worker runs alone next, and those beside it are not charged."""
    beside = [lab.hold() for _ in range(2)]
    for _, path in beside:
        path.touch()
    id = lab.defer("crash", {"path": lab.path()})
    worker = lab.start()
    assert worker.ended() != 0
    lab.give_up()
    lab.start()
    job, *others = lab.end(id, *[other for other, _ in beside])
    assert (job["state"], job["crashes"]) == ("succeeded", 1)
    assert {other["state"] for other in others} == {"succeeded"}


def test_crashed_runs_alone(lab: Any) -> None:
    """No job starts beside one that has crashed before, until that has ended."""
    worker = lab.start()
    id, path = lab.hold()
    lab.reach(id, "running")
    worker.kill()
    lab.give_up()
    second = lab.start()
    wait_for(lambda: lab.job(id)["state"] == "running" and lab.job(id)["claims"] == 2)
    others = [lab.defer("echo") for _ in range(3)]
    lab.heartbeat()
    assert second.started() == [id]
    path.touch()
    lab.end(id, *others)
