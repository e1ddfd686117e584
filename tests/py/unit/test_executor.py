"""Claims in a worker, from the fetch until their outcome is known."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pgdefer import App
from pgdefer.database.pool import AsyncPool, SyncPool
from pgdefer.tasks.context import JobContext
from pgdefer.worker.announcer import Announcer
from pgdefer.worker.batch_runner import BatchRunner
from pgdefer.worker.claim import Claim, gather
from pgdefer.worker.completer import Completer
from pgdefer.worker.ending import STOPPED, TIMED_OUT, outcome_of
from pgdefer.worker.executor import Executor
from pgdefer.worker.heartbeat import Heartbeat, clock
from pgdefer.worker.outcomes import Settled
from pgdefer.worker.runners import LoopRunner, ThreadRunner
from pgdefer.worker.slots import Slots
from pgdefer.worker.state import WorkerState
from pgdefer.worker.threads import Threads


class Runner:
    """Records its calls, and runs nothing."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def start(self, claim: Claim) -> None:
        self.told.append(("start", claim.job.id))

    def abort(self, claim: Claim, reason: str) -> None:
        self.told.append((reason, claim.job.id))

    def interrupt(self, claim: Claim) -> None:
        self.told.append(("interrupt", claim.job.id))

    def close(self) -> None: ...


class Bench:
    """An executor without a database."""

    def __init__(self) -> None:
        self.app = App("dbname=nowhere")
        self.state = WorkerState(None)
        announcer = Announcer({})
        self.completer = Completer(announcer)
        self.executor = Executor(self.app, self.state, self.completer, announcer)
        self.runner = Runner()
        self.slots = Slots(10)
        names = ["on_beat", "on_gone", "on_lost", "on_silence"]
        ignored: dict[str, Any] = dict.fromkeys(names, lambda _: None)
        self.heartbeat = Heartbeat(self.app.source, 10.0, 30.0, memory=lambda: None, **ignored)
        self.heartbeat.beat_at = clock()
        self.executor.attach(self.heartbeat, lambda _: self.runner, lambda: None)

    def claim(self, id: int, timeout: dt.timedelta | None = None) -> Claim:
        row: Any = (
            id,
            100 + id,
            "t",
            "\1{}",
            "q",
            0,
            None,
            1,
            None,
            None,
            timeout,
            None,
            None,
            None,
        )
        self.slots.used += 1
        return Claim(JobContext(self.app.client, row), self.slots, clock())

    def use_runners(self, threads: Threads) -> None:
        """Run the handlers, which use no connections."""
        source, keeper = self.app.source, self.executor
        thread_runner = ThreadRunner(threads, SyncPool(source, 0), keeper)
        loop_runner = LoopRunner(AsyncPool(source, 0), thread_runner, keeper)
        batch_runner = BatchRunner(threads, thread_runner, keeper)

        def runner_of(claim: Claim) -> ThreadRunner | LoopRunner | BatchRunner:
            if claim.batch:
                return batch_runner
            assert claim.task is not None
            return loop_runner if claim.task.is_async else thread_runner

        keeper.attach(self.heartbeat, runner_of, lambda: None)

    def outcomes(self) -> list[tuple[int, str]]:
        texts = [json.loads(text) for _, text in self.completer.unsent]
        return [(outcome["id"], outcome["outcome"]) for outcome in texts]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110 (nothing is set that could be waited for)
            await asyncio.sleep(0)


async def test_a_claim_that_ends() -> None:
    bench = Bench()
    first, second = bench.claim(1), bench.claim(2)
    bench.executor.take([first, second])
    assert bench.runner.told == [("start", 1), ("start", 2)]
    assert (bench.slots.free, bench.executor.is_idle) == (8, False)
    bench.executor.end(first, '{"id":1,"claim":101,"outcome":"succeeded"}')
    bench.executor.end(second, Settled("succeeded", "succeeded"))
    assert bench.outcomes() == [(1, "succeeded")]
    assert (bench.slots.free, bench.executor.is_idle, bench.executor.finished) == (10, True, 2)


async def test_a_batch_uses_one_slot_until_its_last_job_ends() -> None:
    bench = Bench()
    bench.app.task(name="t", batch=4)(lambda jobs: None)
    second = dt.timedelta(seconds=1)
    claims = [bench.claim(id, second) for id in (1, 2, 3, 4)]
    bench.slots.used = 1
    starts = gather(claims, bench.app.tasks)
    assert starts == claims[:1]
    bench.executor.abort(claims[0], "cancelled")
    claims[2].asked_at -= 3600  # others may have ended its claim
    bench.executor.take(starts)
    assert bench.runner.told == [("start", 2)]
    assert bench.outcomes() == [(1, "aborted"), (3, "released")]
    assert (bench.slots.used, bench.slots.running) == (1, 1)
    bench.executor.end(claims[3], '{"id":4,"claim":104,"outcome":"succeeded"}')
    assert (bench.slots.used, bench.slots.running) == (1, 1)
    bench.executor.end(claims[1], '{"id":2,"claim":102,"outcome":"succeeded"}')
    assert (bench.slots.used, bench.slots.running) == (0, 0)
    assert bench.executor.is_idle


async def test_a_batch_of_which_nothing_is_to_run() -> None:
    bench = Bench()
    bench.app.task(name="t", batch=4)(lambda jobs: None)
    claims = [bench.claim(id) for id in (1, 2)]
    bench.slots.used = 1
    starts = gather(claims, bench.app.tasks)
    for claim in claims:
        bench.executor.abort(claim, "cancelled")
    bench.executor.take(starts)
    assert (bench.runner.told, bench.slots.used, bench.slots.running) == ([], 0, 0)
    assert bench.outcomes() == [(1, "aborted"), (2, "aborted")]


async def test_what_comes_while_the_worker_stops_goes_back() -> None:
    bench = Bench()
    bench.state.stopping.set()
    bench.executor.take([bench.claim(1)])
    assert (bench.runner.told, bench.outcomes()) == ([], [(1, "released")])
    assert (bench.slots.free, bench.executor.given_back) == (10, 0)


async def test_claims_that_wait_in_vain_for_a_heartbeat_go_back() -> None:
    bench = Bench()
    bench.heartbeat.beat_at -= 3600
    bench.executor.take([bench.claim(1), bench.claim(2)])
    await until(lambda: bench.executor.is_idle)
    bench.executor.take([bench.claim(3)])
    assert (bench.runner.told, bench.slots.used) == ([], 1)
    assert bench.outcomes() == [(1, "released"), (2, "released")]
    bench.heartbeat.beat_at = clock()
    bench.executor.on_beat()
    assert bench.runner.told == [("start", 3)]


async def test_a_claim_that_is_given_back_has_no_other_end() -> None:
    bench = Bench()
    claim = bench.claim(1)
    bench.executor.take([claim])
    bench.executor.abort_all(STOPPED)
    bench.executor.give_back_all()
    bench.executor.end(claim, '{"id":1,"claim":101,"outcome":"succeeded"}')
    assert bench.runner.told == [("start", 1), (STOPPED, 1)]
    assert (bench.outcomes(), bench.executor.given_back) == ([(1, "released")], 1)


async def test_a_timeout_aborts_and_interrupts() -> None:
    bench = Bench()
    claim = bench.claim(1, dt.timedelta(0))
    bench.executor.take([claim])
    assert claim in bench.heartbeat.extend_after
    await until(lambda: len(bench.runner.told) == 3)
    assert bench.runner.told == [("start", 1), (TIMED_OUT, 1), ("interrupt", 1)]
    bench.executor.end(claim, Settled("succeeded", "succeeded"))
    assert claim not in bench.heartbeat.extend_after


async def test_an_abort_is_told_once_and_before_the_start_it_prevents_it() -> None:
    bench = Bench()
    running, waiting = bench.claim(1), bench.claim(2)
    bench.executor.take([running])
    await until(lambda: not bench.executor.is_starting)
    bench.heartbeat.beat_at = clock() - 31  # perhaps this process was frozen
    bench.executor.take([waiting])
    for _ in range(2):
        bench.executor.abort_some([(1, 101, "why"), (2, 102, "why"), (3, 103, "why")])
    assert bench.runner.told == [("start", 1), ("why", 1)]
    bench.heartbeat.beat_at = clock()
    bench.executor.on_beat()
    assert bench.outcomes() == [(2, "aborted")]


async def test_the_claims_of_a_worker_that_is_gone_are_no_longer_its_own() -> None:
    bench = Bench()
    running, waiting = bench.claim(1), bench.claim(2)
    bench.state.jobs_left = 8
    bench.executor.take([running])
    await until(lambda: not bench.executor.is_starting)
    bench.heartbeat.beat_at = clock() - 31
    bench.executor.take([waiting])
    bench.executor.on_worker_gone()
    assert bench.runner.told == [("start", 1), ("the claim was lost", 1)]
    assert bench.state.jobs_left == 9
    assert (bench.outcomes(), bench.slots.free) == ([], 9)


async def test_a_refused_outcome_is_replaced_once() -> None:
    bench = Bench()
    claim = bench.claim(1)
    sent = [(claim, '{"id":1,"claim":101,"outcome":"retry_later","needs":[1]}')]
    bench.completer.on_refused(1, 101, "QJ002", sent)  # another worker has the claim now
    assert bench.outcomes() == []
    for _ in range(2):
        bench.completer.on_refused(1, 101, "QJ005", sent)
    assert bench.outcomes() == [(1, "failed")]


async def test_a_hint_is_kept_until_somebody_waits() -> None:
    state = WorkerState(None)
    state.hint()
    assert await state.wait(0)
    assert not await state.wait(0)
    waiting = asyncio.create_task(state.wait(None))
    await until(lambda: state.is_waiting)
    state.hint()
    assert await waiting


@pytest.mark.parametrize("freeze", [None, "of all", "of jobs with a timeout"])
@pytest.mark.parametrize("is_batch", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
async def test_no_handler_begins_after_a_freeze(
    freeze: str | None, is_batch: bool, is_async: bool
) -> None:
    bench = Bench()
    threads = Threads(asyncio.get_running_loop(), 1)
    bench.use_runners(threads)
    began = []
    is_thawed = threading.Event()

    async def coroutine(*jobs: Any) -> None:
        began.append(jobs)

    def function(*jobs: Any) -> None:
        began.append(jobs)

    options: dict[str, Any] = {"batch": 2} if is_batch else {}
    bench.app.task(name="t", **options)(coroutine if is_async else function)
    second = dt.timedelta(seconds=1)
    claims = [bench.claim(id, second) for id in (1, 2)]
    if is_batch:
        bench.slots.used = 1
    bench.state.jobs_left = 8

    def freezes() -> Callable[[], None]:
        is_thawed.wait(300)
        return bench.state.hint

    threads.submit(freezes)  # the only thread is busy meanwhile, as the loop is
    bench.executor.take(gather(claims, bench.app.tasks))
    if freeze == "of all":
        bench.heartbeat.beat_at -= 3600
    elif freeze:
        for claim in claims:
            claim.asked_at -= 11
    is_thawed.set()
    await until(lambda: bench.executor.is_idle)
    threads.close()
    assert bool(began) is (freeze is None)
    outcome = "released" if freeze else "succeeded"
    assert bench.outcomes() == [(1, outcome), (2, outcome)]
    assert [claim.timer for claim in claims] == [None, None]
    assert (bench.slots.used, bench.slots.running, bench.executor.given_back) == (0, 0, 0)
    assert bench.state.jobs_left == (10 if freeze else 8)


async def test_a_claim_that_was_lost_goes_back() -> None:
    bench = Bench()
    (claim,) = claims = [bench.claim(1)]
    bench.executor.take(claims)
    bench.executor.on_worker_gone()
    outcome = outcome_of(claim.job, claim.failure_policy, asyncio.CancelledError())
    bench.executor.end(claim, outcome)
    assert bench.outcomes() == [(1, "released")]
    assert bench.executor.given_back == 0


async def test_a_job_does_not_start_beside_an_earlier_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its claim was lost, and it was claimed again here before its handler has ended."""
    monkeypatch.setattr("pgdefer.worker.executor.BESIDE", 0.01)
    bench = Bench()
    first = bench.claim(1)
    bench.executor.take([first])
    bench.executor.on_worker_gone()
    again, other = bench.claim(1), bench.claim(2)
    bench.executor.take([again, other])
    assert again in bench.executor.waiting
    await until(lambda: bench.outcomes() == [(1, "released")])
    assert bench.slots.used == 2
    bench.executor.take([bench.claim(1)])
    bench.executor.give_back_waiting()  # as for a stop
    bench.executor.end(first, outcome_of(first.job, None, asyncio.CancelledError()))
    bench.executor.take([bench.claim(1)])
    await until(lambda: not bench.executor.is_starting)
    assert bench.outcomes() == [(1, "released")] * 3
    told = [("start", 1), ("the claim was lost", 1), ("start", 2), ("start", 1)]
    assert (bench.runner.told, bench.slots.used) == (told, 2)


async def test_the_last_claim_starts_when_an_earlier_run_has_ended() -> None:
    bench = Bench()
    first, lost, last = (bench.claim(1) for _ in range(3))
    lost.job.claim, last.job.claim = 102, 103
    bench.executor.take([first, lost, last])
    assert bench.runner.told == [("start", 1)]
    bench.executor.end(first, Settled("yielded", "ready"))
    await until(lambda: len(bench.runner.told) == 2)
    assert list(bench.executor.running) == [last]
    assert [json.loads(text)["claim"] for _, text in bench.completer.unsent] == [102]
    bench.executor.end(last, Settled("succeeded", "succeeded"))
    assert bench.executor.is_idle
    assert bench.slots.free == 10


async def test_a_batch_starts_without_a_job_that_still_runs() -> None:
    bench = Bench()
    bench.app.task(name="t", batch=4)(lambda jobs: None)
    bench.executor.take(gather([bench.claim(1)], bench.app.tasks))
    bench.executor.on_worker_gone()
    claims = [bench.claim(1), bench.claim(2)]
    bench.slots.used = 2
    bench.executor.take(gather(claims, bench.app.tasks))
    await until(lambda: not bench.executor.is_starting)
    assert bench.runner.told[2:] == [("start", 2)]
    assert bench.executor.waiting == claims[:1]
    bench.executor.end(claims[1], '{"id":2,"claim":102,"outcome":"succeeded"}')
    bench.executor.give_back_waiting()
    assert bench.outcomes() == [(2, "succeeded"), (1, "released")]
    assert bench.slots.used == 1
    assert bench.slots.running == 1, "of the first run of job 1"


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
@pytest.mark.parametrize("where", ["decide", "codec", "within"])
@pytest.mark.parametrize("handler", ["function", "coroutine", "batch", "coroutine of a batch"])
async def test_what_is_no_exception_ends_only_the_job(
    handler: str,
    where: str,
    kind: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As of sys.exit in what decides about failures: neither worker nor thread ends, nor a slot."""
    bench = Bench()
    threads = Threads(asyncio.get_running_loop(), 1)
    bench.use_runners(threads)

    def leave(*_: object) -> Any:
        raise kind

    def end(*_: object) -> list[str]:
        if where == "decide":
            raise ValueError
        return ["result"]

    async def coroutine(*_: object) -> list[str]:
        return end()

    if where == "codec":
        monkeypatch.setattr(type(bench.app.client.codec), "dumps", leave)
    elif where == "within":
        for place in ("handler", "invoke_batch", "invoke_batch_async"):
            monkeypatch.setattr(f"pgdefer.worker.{place}.success", leave)
    define = bench.app.task(name="t", decide=leave, batch=2 if "batch" in handler else None)
    define(coroutine if "coroutine" in handler else end)
    for number in (1, 2):
        claims = [bench.claim(number)]
        bench.slots.used = 1
        bench.executor.take(gather(claims, bench.app.tasks))
        await until(lambda: bench.executor.is_idle)
    threads.close()
    outcome = "succeeded" if where == "codec" else "failed"
    assert bench.outcomes() == [(1, outcome), (2, outcome)]
    assert kind.__name__ in caplog.text
    assert (bench.slots.used, bench.slots.running) == (0, 0)
