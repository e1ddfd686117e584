"""At most one job per run of a schedule, however many sessions check, and whatever the clock and server do.

Every test makes the same check of the whole database at its end (`sound`): at most one job per run,
no run that was handled after a later one, and no job of a run that was not handled.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgdefer.database.embedded import EmbeddedServer, temporary_server
from support import create_database, install
from workers import CheckedThread, beside, wait_for

from .conftest import Sleeper

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]
Connect = Callable[..., Connection]
StartSleepers = Callable[..., list[Sleeper]]

FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)

RUNS = """
    select name, run_at, job_id from queue.schedule_runs where not manual and job_id is not null
"""
JOBS = """
    select id, args ->> 'name', (args ->> 'scheduled_for')::timestamptz from queue.jobs
    where task = 't'
"""


class Ticker(CheckedThread):
    """Calls tick as fast as it can, and survives every loss of the server."""

    def __init__(self, dsn: str, pause: float = 0.0) -> None:
        super().__init__()
        self._dsn = dsn
        self._pause = pause
        self.ticks = 0
        self.losses = 0

    def work(self) -> None:
        while not self.is_over.is_set():
            try:
                with psycopg.connect(self._dsn, autocommit=True) as conn:
                    while not self.is_over.wait(self._pause):
                        conn.execute("select * from queue.tick()")
                        self.ticks += 1
            except psycopg.OperationalError:
                self.losses += 1
                time.sleep(0.05)


@contextlib.contextmanager
def ticking(dsn: str, n: int, pause: float = 0.0) -> Iterator[list[Ticker]]:
    tickers = [Ticker(dsn, pause) for _ in range(n)]
    with beside(*tickers):
        yield tickers


def schedule(conn: Connection, name: str, cron: str, **options: Any) -> None:
    timezone = options.pop("timezone", "UTC")
    conn.execute(
        "select queue.schedule(%s, %s, 't', jsonb_build_object('name', %s::text), %s, %s)",
        (name, cron, name, timezone, psycopg.types.json.Jsonb(options)),
    )


def sound(conn: Connection) -> dict[str, list[dt.datetime]]:
    """Check that each run has one job at most, and return the runs with jobs by name."""
    with conn.transaction():
        conn.execute("set transaction isolation level repeatable read")
        noted = {id: (name, run_at) for name, run_at, id in conn.execute(RUNS)}
        jobs = {id: (name, run_at) for id, name, run_at in conn.execute(JOBS)}
        assert conn.execute("select * from queue.check()").fetchall() == []
    assert len(set(jobs.values())) == len(jobs), "two jobs for one run"
    # The history forgets all but the last hundred.
    assert noted.items() <= jobs.items()
    found: dict[str, list[dt.datetime]] = {}
    for name, run_at in sorted(jobs.values()):
        found.setdefault(name, []).append(run_at)
    return found


def is_gapless(runs: list[dt.datetime], step: float) -> bool:
    return all((b - a).total_seconds() == step for a, b in itertools.pairwise(runs))


def now(conn: Connection) -> dt.datetime:
    row = conn.execute("select clock_timestamp()").fetchone()
    assert row is not None
    return row[0]


# Many at once


def test_eight_tickers(dsn: str, conn: Connection) -> None:
    names = [f"s{i}" for i in range(30)]
    for name in names:
        schedule(conn, name, random.choice(["every 1 second", "* * * * * *"]), catch_up="all")
    begun = now(conn)
    with ticking(dsn, 8) as tickers:
        time.sleep(4)
    ended = now(conn)
    found = sound(conn)
    assert set(found) == set(names)
    for runs in found.values():
        assert is_gapless(runs, 1)
        assert runs[0] - begun < dt.timedelta(seconds=2)
        assert ended - runs[-1] < dt.timedelta(seconds=2)
    assert min(ticker.ticks for ticker in tickers) > 5


def test_fetches_and_ticks(dsn: str, conn: Connection, start_sleepers: StartSleepers) -> None:
    for i in range(20):
        schedule(conn, f"s{i}", "every 1 second", catch_up="all")
    sleepers = start_sleepers(4)
    with ticking(dsn, 2, pause=0.05):
        time.sleep(4)
    for i in range(20):
        conn.execute("select queue.enable_schedule(%s, false)", (f"s{i}",))
    jobs = wait_for(
        lambda: conn.execute(
            "select count(*) from queue.jobs having bool_and(state = 'succeeded')"
        ).fetchone()
    )
    assert jobs[0] == sum(len(sleeper.claimed) for sleeper in sleepers) >= 60
    assert all(is_gapless(runs, 1) for runs in sound(conn).values())


def test_changes_against_tickers(dsn: str, connect: Connect, conn: Connection) -> None:
    """Workers that start register the same schedules while others run, change and remove them."""
    errors: list[BaseException] = []
    is_short = threading.Event()
    is_short.set()
    changes: list[Callable[[Connection, str], object]] = [
        lambda conn, name: conn.execute("select queue.unschedule(%s)", (name,)),
        lambda conn, name: conn.execute(
            "select queue.enable_schedule(name, not enabled) from queue.schedules where name = %s",
            (name,),
        ),
        lambda conn, name: schedule(
            conn, name, "* * * * * *", catch_up="all", timezone="Asia/Tokyo"
        ),
        *[lambda conn, name: schedule(conn, name, "every 1 second", catch_up="all")] * 5,
    ]

    def register(conn: Connection, seed: int) -> None:
        generator = random.Random(seed)
        end = time.monotonic() + 3
        try:
            while time.monotonic() < end or is_short.is_set():
                # Another session may just be removing it.
                with contextlib.suppress(psycopg.errors.InvalidParameterValue):
                    generator.choice(changes)(conn, f"s{generator.randrange(5)}")
        except BaseException as error:
            errors.append(error)

    with ticking(dsn, 3):
        threads = [threading.Thread(target=register, args=(connect(), i)) for i in range(4)]
        for thread in threads:
            thread.start()
        try:
            wait_for(lambda: errors or len(conn.execute(JOBS).fetchall()) >= 5)
        finally:
            is_short.clear()
        for thread in threads:
            thread.join()
    assert errors == []
    assert sum(len(runs) for runs in sound(conn).values()) >= 5


def test_paused_queue(dsn: str, conn: Connection) -> None:
    for catch_up in ("none", "latest", "all"):
        schedule(conn, catch_up, "every 1 second", catch_up=catch_up)
    with ticking(dsn, 8, pause=0.01):
        time.sleep(1.5)
        conn.execute("select queue.pause('default')")
        paused = now(conn)
        time.sleep(3)
        during = sound(conn)
        resuming = now(conn)
        conn.execute("select queue.resume('default')")
        resumed = now(conn)
        wait_for(lambda: all(runs[-1] > resumed for runs in sound(conn).values()))
    found = sound(conn)
    assert all(runs[-1] <= paused for runs in during.values()), "nothing piles up"
    assert is_gapless(found["all"], 1)
    for catch_up in ("none", "latest"):
        first = next(run for run in found[catch_up] if run > paused)
        assert first > resuming - dt.timedelta(seconds=1), (
            f"{catch_up}: of the runs missed the last one is made up for"
        )


# An application that waits delays no schedule


def test_queueing_lock_of_an_open_transaction(dsn: str, connect: Connect, conn: Connection) -> None:
    schedule(conn, "waits", "every 1 second", queueing_lock="k", catch_up="latest")
    schedule(conn, "goes on", "every 1 second", catch_up="all")
    application = connect(autocommit=False)
    application.execute("select queue.defer('a', queueing_lock => 'k')")
    with ticking(dsn, 2, pause=0.01):
        reason = wait_for(
            lambda: conn.execute(
                "select 1 from queue.schedules where reason = 'queueing_lock'"
            ).fetchone()
        )
        assert reason
        time.sleep(2)
        meanwhile = sound_names(conn)
        application.rollback()
        wait_for(lambda: "waits" in sound_names(conn))
    assert meanwhile == {"goes on"}
    runs = sound(conn)["goes on"]
    assert len(runs) >= 2
    assert is_gapless(runs, 1)


def sound_names(conn: Connection) -> set[str]:
    rows = conn.execute("select name from queue.schedule_runs where job_id is not null")
    return {row[0] for row in rows}


def test_cost_under_a_held_snapshot(connect: Connect, conn: Connection) -> None:
    """Runs leave dead rows that can't be removed; the search for due runs does not read them."""
    for i in range(200):
        schedule(conn, f"s{i:03}", "every 1 second", catch_up="all")
    with connect(autocommit=False) as reader:
        reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        reader.execute("select count(*) from queue.jobs")
        for _ in range(50):
            conn.execute(
                "update queue.schedule set due_at = clock_timestamp(),"
                " last_run_at = null, next_run_at = date_trunc('second', clock_timestamp())"
            )
            conn.execute("select * from queue.tick()")
        time.sleep(1.1)  # until the runs of that second are in the past
        conn.execute("select * from queue.tick()")
        conn.execute("set enable_seqscan = off")  # as in fetch and tick
        mark = conn.execute("select due_at from queue.cursor").fetchone()
        row = conn.execute(
            "explain (analyze, buffers, format json) select s.due_at from queue.schedule s "
            "where s.due_at >= %s order by s.due_at limit 1",
            mark,
        ).fetchone()
        assert row is not None
        plan = row[0][0]["Plan"]
        pages = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        assert pages < 60, f"{pages} pages read, of rows dead 50 times over"
        reader.rollback()


# pg_cron, and workers that sleep


def test_what_pg_cron_calls(connect: Connect, conn: Connection) -> None:
    """One statement, alone, as a role that is only an operator."""
    conn.execute("create role pgdefer_cron login")
    try:
        conn.execute("select queue.grant_access('pgdefer_cron', 'operator')")
        schedule(conn, "s", "every 1 second")
        cron = connect(user="pgdefer_cron")
        wait_for(lambda: cron.execute("select queue.tick()") and "s" in sound_names(conn))
        cron.close()
        sound(conn)
    finally:
        conn.execute("select queue.revoke_access('pgdefer_cron')")
        conn.execute("drop role pgdefer_cron")


def test_an_idle_worker_starts_on_the_second(
    conn: Connection, start_sleepers: StartSleepers
) -> None:
    [sleeper] = start_sleepers(1)
    wait_for(lambda: sleeper.is_asleep)
    schedule(conn, "s", "every 1 second")
    scheduled_at = time.time()
    wait_for(lambda: len(sleeper.claimed) >= 6)
    sleeps = [sleep for sleep in sleeper.sleeps if sleep.asked_at > scheduled_at]
    conn.execute("select queue.unschedule('s')")
    rows = conn.execute(
        "select extract(epoch from started_at - (args ->> 'scheduled_for')::timestamptz)::float"
        " from queue.jobs where started_at is not null"
    ).fetchall()
    delays = [row[0] for row in rows]
    assert min(delays) > 0, "never before its time"
    # It slept until the second came, and not from poll to poll.
    assert all(sleep.ends_on_a_second() for sleep in sleeps)
    assert len(sleeps) < 3 * len(delays) + 5
    sound(conn)


# The server and its clock


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    with temporary_server() as server:
        create_database(server, "own")
        install(server, "own")
        yield server


def test_server_restarts(own_server: EmbeddedServer) -> None:
    dsn = own_server.dsn("own")
    with psycopg.connect(dsn, autocommit=True) as conn:
        for i in range(10):
            schedule(conn, f"s{i}", "every 1 second", catch_up="all")
        begun = now(conn)
    with ticking(dsn, 8) as tickers:
        for mode in ("fast", "immediate"):
            time.sleep(1.2)
            own_server._stop(mode)  # stop would remove it
            time.sleep(1.2)
            own_server.ensure_running()
        time.sleep(1.2)
    assert all(ticker.losses for ticker in tickers)
    with psycopg.connect(dsn, autocommit=True) as conn:
        found = sound(conn)
        ended = now(conn)
    assert len(found) == 10
    for runs in found.values():
        assert is_gapless(runs, 1), "nothing is lost where all is to be made up for"
        assert runs[0] - begun < dt.timedelta(seconds=2)
        assert ended - runs[-1] < dt.timedelta(seconds=3)


class Clock:
    """A server whose clock can be set, in seconds beside the right time."""

    def __init__(self, server: EmbeddedServer, file: Path) -> None:
        self._file = file
        self.dsn = server.dsn("own")

    def set(self, seconds: int) -> None:
        unfinished = self._file.with_suffix(".new")
        unfinished.write_text(f"{seconds:+d}\n")
        unfinished.replace(self._file)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    if FAKETIME is None:
        pytest.skip("libfaketime is not installed (`make tools`)")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgdefer-clock-")))
        folder.chmod(0o755)
        file = folder / "clock"
        file.write_text("+0\n")
        with monkeypatch.context() as patch:
            patch.setenv("LD_PRELOAD", str(FAKETIME))
            patch.setenv("FAKETIME_TIMESTAMP_FILE", str(file))
            patch.setenv("FAKETIME_NO_CACHE", "1")
            patch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            patch.setenv("FAKETIME_DISABLE_SHM", "1")
            server = stack.enter_context(temporary_server())
        create_database(server, "own")
        install(server, "own")
        yield Clock(server, file)


HOUR = 3600


def test_outage_of_three_hours(clock: Clock) -> None:
    """The server's clock runs while nobody checks; then eight tickers check at once."""
    with psycopg.connect(clock.dsn, autocommit=True) as conn:
        # A run every 20 minutes, the last of which was 10 minutes before they check.
        minute = now(conn).minute
        cron = ",".join(str((minute + 10 + 20 * i) % 60) for i in range(3)) + " * * * *"
        for catch_up in ("none", "latest", "all"):
            schedule(conn, catch_up, cron, catch_up=catch_up)
            schedule(conn, f"{catch_up}, 1 h", cron, catch_up=catch_up, max_delay="1 hour")
        schedule(conn, "overlap", cron, catch_up="all", overlap="skip")
        clock.set(3 * HOUR)
        with ticking(clock.dsn, 8):
            wait_for(lambda: len(sound(conn).get("all", [])) == 9)
            time.sleep(0.5)
        found = sound(conn)
        assert {name: len(runs) for name, runs in found.items()} == {
            "latest": 1,
            "all": 9,
            "latest, 1 h": 1,
            "all, 1 h": 3,
            "overlap": 1,
        }
        assert found["latest"] == found["all"][-1:]
        assert found["all, 1 h"] == found["all"][-3:]
        skipped = conn.execute(
            "select name, skipped, count(*) from queue.schedule_runs where skipped is not null"
            " group by 1, 2 order by 1, 2"
        ).fetchall()
        assert skipped == [
            ("all, 1 h", "max_delay", 6),
            ("latest", "missed", 8),
            ("latest, 1 h", "missed", 8),
            ("none", "missed", 9),
            ("none, 1 h", "missed", 9),
            ("overlap", "overlap", 8),
        ]


def wait_for_ticks(tickers: list[Ticker]) -> None:
    """Wait until each has begun and ended a tick since the call."""
    before = [ticker.ticks for ticker in tickers]
    wait_for(lambda: all(t.ticks > n + 1 for t, n in zip(tickers, before, strict=True)))


@pytest.mark.long
def test_clock_steps(clock: Clock) -> None:
    with (
        psycopg.connect(clock.dsn, autocommit=True) as conn,
        ticking(clock.dsn, 8, pause=0.01) as tickers,
    ):
        schedule(conn, "all", "every 10 seconds", catch_up="all")
        schedule(conn, "latest", "every 1 second", catch_up="latest")

        def runs(name: str) -> list[dt.datetime]:
            return sound(conn).get(name, [])

        def is_reached(name: str, at: dt.datetime) -> bool:
            found = runs(name)
            return bool(found) and found[-1] >= at

        wait_for(lambda: runs("latest"))
        for turn in range(2):
            at = now(conn) + dt.timedelta(seconds=HOUR)
            clock.set((turn + 1) * HOUR)
            wait_for(lambda at=at: is_reached("latest", at) and is_reached("all", at))
            # Back: finished runs do not run again.
            clock.set(0)
            wait_for_ticks(tickers)
            last = {name: runs(name)[-1] for name in ("all", "latest")}
            for step in (0, -HOUR, 0):
                clock.set(step)
                wait_for_ticks(tickers)
                # A change made under the wrong clock must not repeat a run either.
                schedule(conn, "latest", "every 1 second", catch_up="latest", priority=step)
                time.sleep(1.1)
                assert {name: runs(name)[-1] for name in ("all", "latest")} == last
                # Other schedules begin at once, whatever the clock showed before.
                schedule(conn, f"from {turn}, {step}", "every 1 second", overlap="skip")
                wait_for(lambda name=f"from {turn}, {step}": runs(name))
        clock.set(2 * HOUR)
        wait_for(lambda: is_reached("latest", last["latest"] + dt.timedelta(seconds=2)))
        assert is_gapless(runs("all"), 10), "nothing is lost where all is to be made up for"
