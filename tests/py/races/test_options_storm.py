"""All options of a job together, in transactions that overlap: no call may raise anything but the contract's errors.

One thread plays several sessions in turn, so that a seed gives the same calls again. A session defers, claims, ends
claims or operates, alone or in a transaction that stays open, commits late, or is rolled back, to a savepoint too. A
call that would wait for another session is refused by lock_timeout, and its transaction is rolled back. Admissions
also come in slices of a few jobs, so that a range of the log, or the new tags of lanes, are left half done.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from .test_failure_storm import POLITE, drain

pytestmark = pytest.mark.client

Claim = tuple[int, int]
QUEUES = ["a", "a.b", "c"]
LONG = "x" * 2000
REFUSALS = POLITE | {"QJ006", "QJ009"}
# lock_timeout, and the limit for a session that idles with the admission lock
LEFT_OUT = {"55P03", "25P03"}


class Session:
    """A connection, whose transaction may be open; what is rolled back is forgotten here too."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.worker: int | None = None
        self.claims: list[Claim] = []
        self.connect()

    def connect(self) -> None:
        options = "-c lock_timeout=30ms -c statement_timeout=300s"
        self.conn = psycopg.connect(self.dsn, autocommit=True, options=options)
        self.saved: list[list[Claim]] = []  # at the transaction's begin, and at its savepoints
        self.is_repeatable = False

    @property
    def is_open(self) -> bool:
        return bool(self.saved)

    def begin(self, repeatable: bool) -> None:
        level = "repeatable read" if repeatable else "read committed"
        self.conn.execute(f"begin isolation level {level}")
        self.is_repeatable = repeatable
        self.saved.append(list(self.claims))

    def save(self) -> None:
        self.conn.execute(f"savepoint s{len(self.saved)}")
        self.saved.append(list(self.claims))

    def commit(self) -> None:
        self.conn.execute("commit")
        self.saved.clear()

    def roll_back(self) -> None:
        """Roll back to the last savepoint, or the transaction if it has none."""
        self.claims = self.saved.pop()
        self.conn.execute(f"rollback to savepoint s{len(self.saved)}" if self.saved else "rollback")

    def close(self) -> None:
        self.conn.close()


class Storm:
    def __init__(self, dsn: str, seed: int) -> None:
        self.dice = random.Random(seed)
        self.sessions = [Session(dsn) for _ in range(5)]
        self.reader = psycopg.connect(dsn, autocommit=True)
        self.counts: Counter[str] = Counter()
        self.calls: list[str] = []
        self.groups = 0

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        self.reader.close()

    def run(self, steps: int) -> None:
        kinds: dict[Callable[[Session], None], int] = {
            self.turn: 14,
            self.defer: 22,
            self.fetch: 16,
            self.finish: 18,
            self.operate: 12,
            self.operate_on_many: 8,
            self.configure: 8,
            self.tick: 5,
            self.admit: 5,
            self.crash: 1,
        }
        for step in range(steps):
            session = self.dice.choice(self.sessions)
            (kind,) = self.dice.choices(list(kinds), list(kinds.values()))
            kind(session)
            if step % 5 == 0:
                self.check()
        for session in self.sessions:
            while session.is_open:
                self.dice.choice([session.commit, session.roll_back])()
        self.check()

    def check(self) -> None:
        broken = self.reader.execute("select * from queue.check()").fetchall()
        assert not broken, broken

    def call(self, session: Session, query: str, *given: Any, also: str = "") -> list[Any]:
        """Call a function; a refusal rolls back to the last savepoint, and returns nothing."""
        number = self.sessions.index(session)
        self.calls.append(
            f"{number}{'*' * len(session.saved)}: {query} {list(given)}".replace(LONG, "x...")
        )
        try:
            rows = session.conn.execute(query.encode(), given).fetchall()
        except psycopg.Error as error:
            self.calls.append(f"{number}: {error.sqlstate}")
            accepted = REFUSALS | LEFT_OUT | {also}
            if session.is_repeatable:
                accepted |= {"40001", "QJ008"}
            if not session.conn.closed and error.sqlstate not in accepted:
                raise
            self.counts[error.sqlstate or "closed"] += 1
            if session.conn.closed:
                session.claims = session.saved[0] if session.saved else session.claims
                session.connect()
            elif session.is_open:
                session.roll_back()
            if error.sqlstate == "55P03":
                self.end_one()
            return []
        self.counts[query.split("(")[0].split()[-1]] += 1
        return rows

    def end_one(self) -> None:
        """End a transaction, for which a call may have waited."""
        if still := [session for session in self.sessions if session.is_open]:
            session = self.dice.choice(still)
            commits = self.dice.random() < 0.6
            self.calls.append(
                f"{self.sessions.index(session)}: {'commit' if commits else 'rollback'}"
            )
            if commits:
                session.commit()
            while session.is_open:
                session.roll_back()

    def some(self, most: int) -> list[int]:
        """Ids of jobs, mostly new ones."""
        rows = self.reader.execute(
            "select id from queue.job order by id desc limit %s", [self.dice.choice([5, 30, 300])]
        ).fetchall()
        return self.dice.sample([id for (id,) in rows], min(len(rows), self.dice.randint(1, most)))

    # What the sessions do

    def turn(self, session: Session) -> None:
        chance = self.dice.random()
        number = self.sessions.index(session)
        if not session.is_open:
            session.begin(self.dice.random() < 0.1)
            self.calls.append(f"{number}: begin{' repeatable' * session.is_repeatable}")
        elif chance < 0.4:
            session.commit()
            self.calls.append(f"{number}: commit")
        elif chance < 0.7:
            session.roll_back()
            self.calls.append(f"{number}: rollback")
        elif len(session.saved) < 4:
            session.save()
            self.calls.append(f"{number}: savepoint")

    def defer(self, session: Session) -> None:
        if self.dice.random() < 0.05:
            self.groups += 1
            callbacks = ['{"task": "end"}', '{"task": "good"}', '{"task": "bad"}']
            self.call(
                session, "select queue.open_group(%s, %s, %s, %s)", f"g{self.groups}", *callbacks
            )
        jobs = [self.job() for _ in range(self.dice.choice([1, 1, 2, 4, 12]))]
        # the group may be closed, or not be committed
        self.call(session, "select queue.defer_many(%s)", json.dumps(jobs), also="22023")

    def job(self) -> dict[str, Any]:
        dice = self.dice
        job: dict[str, Any] = {
            "task": dice.choice("tuv"),
            "queue": dice.choice(QUEUES),
            "priority": dice.choice([0, 0, 0, 1, -1]),
        }
        options: dict[str, Any] = {"retry": dice.choice(POLICIES), **dice.choice(MORE)}
        if self.may(0.4):
            job["lock"] = dice.choice("LMN")
            options["lock_mode"] = dice.choice(["ordered", "mutex"])
        if self.may(0.4):
            keys = dice.sample(list(KEYS), dice.choice([1, 1, 2, 3]))
            options["concurrency"] = [{"key": key} | dice.choice(KEYS[key]) for key in keys]
            if self.may(0.2):
                options["on_limit"] = "discard"
        if self.may(0.4):
            options["share"] = dice.choice(["", "s1", "s2", "s3"])
        if self.may(0.2) and (needs := self.some(3)):
            job["needs"] = needs
            options["needs_mode"] = dice.choice(["all", "any"])
            options["on_need_failure"] = dice.choice(["block", "proceed"])
            if (options["needs_mode"], options["on_need_failure"]) == ("any", "block"):
                options["max_progress"] = 0  # or it may wait for ever for needs that were deleted
        if self.may(0.15):
            job["queueing_lock"] = dice.choice("QR")
            options["unique_until"] = dice.choice(["start", "finish"])
            options["on_conflict"] = dice.choice(["raise", "ignore", "replace"])
        if self.may(0.1):
            options["idempotency_key"] = dice.choice("IJ")
            options["unique_for"] = dice.choice([0.05, 5])
        if self.may(0.15) and (groups := self.open_groups()):
            options["group"] = dice.choice(groups)
        if self.may(0.15):
            options["delay"] = dice.choice([0, 0.01, 0.2])
        if self.may(0.1):
            options["expires_at"] = self.moment(dice.choice([0, 0.05, 60]))
        if self.may(0.15):
            job["deadline"] = self.moment(dice.choice([-60, 0, 1, 60, 600]))
        if self.may(0.08):
            options["held"] = True
        return job | {"options": options}

    def may(self, chance: float) -> bool:
        return self.dice.random() < chance

    def open_groups(self) -> list[str]:
        rows = self.reader.execute("select name from queue.groups where state = 'open'").fetchall()
        return [name for (name,) in rows]

    def moment(self, later: float) -> str:
        whole, part = divmod(int((time.time() + later) * 1e6), 10**6)
        return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{part:06}Z"

    def fetch(self, session: Session) -> None:
        if session.worker is None:
            queues = self.dice.choice([None, ["a*"], ["c", "a"]])
            rows = self.call(session, "select queue.register_worker('w', %s)", queues)
            if not rows or session.is_open:
                return
            session.worker = rows[0][0]
        options = self.dice.choice(
            [None, None, None, {"order": "listed"}, {"tasks": ["t"]}, {"deadline_within": 30}]
        )
        n = self.dice.choice([1, 2, 5, 20])
        given = json.dumps({"ids": self.some(5)} if self.dice.random() < 0.1 else options)
        self.claimed(
            session,
            self.call(
                session,
                "select id, claim, null from queue.fetch(%s, null, %s, %s)",
                session.worker,
                n,
                None if given == "null" else given,
            ),
        )

    def claimed(self, session: Session, rows: list[Any]) -> None:
        session.claims = session.claims + [
            (id, claim) for id, claim, error in rows if error is None
        ]

    def finish(self, session: Session) -> None:
        dice = self.dice
        if not session.claims:
            return
        dice.shuffle(session.claims)
        n = dice.choice([1, 1, 2, 10])
        mine = session.claims[:n]
        outcomes = [{"id": id, "claim": claim} | self.outcome(id) for id, claim in mine]
        if dice.random() < 0.15:
            call = dice.choice(SUSPENSIONS)
            ended = self.call(session, f"select queue.{call}", *mine[0]) and mine[:1]
        elif dice.random() < 0.4:
            rows = self.call(
                session,
                "select id, claim, error from queue.finish_and_fetch(%s, %s, null, %s)",
                session.worker,
                json.dumps(outcomes),
                dice.choice([1, 3, 10]),
            )
            ended = mine if rows else []
            self.claimed(session, rows)
        else:
            ended = self.call(
                session, "select id, claim from queue.finish_many(%s)", json.dumps(outcomes)
            )
        session.claims = [claim for claim in session.claims if claim not in set(ended)]

    def outcome(self, id: int) -> dict[str, Any]:
        outcome = self.dice.choice(["succeeded"] * 6 + ["failed"] * 4 + ["retry_later", "released"])
        more: dict[str, Any] = {}
        if outcome == "failed":
            more["options"] = self.dice.choice(ON_RETRY)
        elif outcome == "retry_later":
            more["at"] = self.moment(self.dice.choice([-1, 0.02]))
            # not a younger one, which may wait for this one at their lock
            more["needs"] = self.dice.choice([[], None, [one for one in self.some(2) if one < id]])
        return {"outcome": outcome} | more

    def operate(self, session: Session) -> None:
        for id in self.some(1):
            self.call(session, f"select queue.{self.dice.choice(ON_ONE)}", id)

    def operate_on_many(self, session: Session) -> None:
        call = self.dice.choice(ON_MANY)
        self.call(session, f"select id, outcome, error from queue.{call}", self.some(6))

    def configure(self, session: Session) -> None:
        call = self.dice.choice(SETTINGS)
        if "{group}" in call:
            call = call.replace("{group}", self.dice.choice([*self.open_groups(), "none"]))
        # there may be no such queue or group; or another session deletes the queue
        self.call(session, f"select queue.{call}", also="22023")

    def tick(self, session: Session) -> None:
        call = self.dice.choice(["tick()", "tick()", "reap()", "heartbeat(%s)"])
        given = [session.worker] if "%s" in call and session.worker else []
        if given or "%s" not in call:
            self.call(session, f"select count(*) from queue.{call}", *given)

    def admit(self, session: Session) -> None:
        """Admit slices of few jobs."""
        if session.is_open:
            return
        session.begin(False)
        if self.call(session, "select queue._lock_admission(true)"):
            for _ in range(self.dice.choice([1, 1, 3])):
                if not self.call(session, "select queue._admit(%s)", self.dice.choice([1, 2, 5])):
                    return
            if self.dice.random() < 0.8:
                session.commit()

    def crash(self, session: Session) -> None:
        if session.worker is not None and not session.is_open:
            self.call(session, "select queue.worker_died(%s)", session.worker)
            session.worker = None  # its claims stay, and are refused


def configured(function: str, name: str, **options: Any) -> str:
    return f"{function}('{name}', '{json.dumps(options)}')"


RATE = {"limit": 3, "per": 0.05}
KEYS: dict[str, list[dict[str, Any]]] = {
    "k1": [{"limit": 1}],
    "k2": [{"limit": 2}, {"limit": 4, "weight": 2}, {"limit": 3, "weight": 3}],
    "k3": [{"rate": RATE}, {"limit": 2, "rate": RATE}, {"rate": RATE, "weight": 2}],
    "k4": [{"limit": 5}, {"limit": 1}],
}
POLICIES: list[dict[str, Any]] = [
    {"max_attempts": 1},
    {"max_attempts": 3, "base": 0},
    {"max_attempts": None, "backoff": "constant", "base": 0.02, "jitter": 0.5},
    {"max_attempts": 4, "wait": 0, "max_crashes": None},
]
MORE: list[dict[str, Any]] = [
    {},
    {},
    {"timeout": 600},
    {"retain": 0},
    {"description": "d", "headers": {"h": LONG}},
    {"max_progress": 1},
]
ON_RETRY: list[dict[str, Any]] = [
    {},
    {},
    {"retry_in": 0},
    {"lock": "L"},
    {"lock": "", "retry_in": 0.01},
    {"lock": "M", "queue": "c", "priority": 1},
    {"retryable": False},
]
SUSPENSIONS = [
    "sleep(%s, %s, 'nap', clock_timestamp() + interval '0.02 s')",
    "wait(%s, %s, 'signal', signal => 's', timeout => '0.2 s')",
    "wait(%s, %s, 'event', event => 'e', timeout => '0.2 s')",
    "begin_step(%s, %s, 'step')",
    "extend(%s, %s, interval '1 hour')",
    "succeed(%s, %s)",
    "fail(%s, %s, 'error')",
    "release(%s, %s)",
]
ON_ONE = [
    "cancel(%s)",
    "cancel(%s, true)",
    "hold(%s)",
    "hold(%s)",
    "unhold(%s)",
    "reschedule(%s)",
    "reschedule(%s, clock_timestamp() + interval '0.05 s')",
    """set_args(%s, '{"n": 1}')""",
    "copy(%s)",
    "signal(%s, 's')",
    "why(%s)",
]
ON_MANY = [
    "retry(%s)",
    "retry(%s)",
    "retry(%s, true)",
    "move(%s, 'c')",
    "move(%s, 'a', true)",
    "delete(%s)",
    "delete(%s, true)",
    "done(%s)",
    "fail_jobs(%s)",
    "set_priority(%s, 1)",
    "set_priority(%s, -1)",
    "set_deadline(%s, clock_timestamp() + interval '10 s')",
    "set_deadline(%s, null)",
]
SETTINGS = [
    configured("configure_queue", "a", max_running=2),
    configured("configure_queue", "a", max_running=None, rate=RATE),
    configured("configure_queue", "c", max_running=3, rate=RATE, retain=60),
    configured("configure_queue", "c", rate=None, retain=None),
    configured("configure_key", "k1", limit=3),
    configured("configure_key", "k*", limit=1),
    configured("configure_key", "k2", limit=1, rate=RATE),
    configured("configure_key", "k1", limit=None),
    configured("configure_key", "k*", limit=None),
    configured("configure_share", "s1", weight=3),
    configured("configure_share", "s1", weight=0.5),
    configured("configure_share", "s*", weight=2),
    configured("configure_share", "s*", weight=None),
    "pause('a*')",
    "resume('a*')",
    "pause(task => 't')",
    "resume(task => 't')",
    "resume()",
    "publish('e')",
    "close_group('{group}')",
    "close_group('{group}')",
    "delete_queue('c', true)",
    "prune(20, 'succeeded', '0')",
    "prune(20, 'cancelled', '0')",
]


@contextlib.contextmanager
def storm(dsn: str, seed: int) -> Iterator[Storm]:
    """The storm of a seed; what went wrong is told with the seed, and with the last calls."""
    made = Storm(dsn, seed)
    try:
        yield made
    except Exception as error:
        calls = "\n".join(made.calls[-40:])
        raise AssertionError(f"seed {seed}: {error}\n{calls}") from error
    finally:
        made.close()


def weather(dsn: str, conn: psycopg.Connection[Any], seed: int, steps: int) -> Counter[str]:
    with storm(dsn, seed) as made:
        made.run(steps)
        conn.execute("select queue.resume(), queue.resume(task => 't')")
        for queue in QUEUES:
            conn.execute("select queue.configure_queue(%s, '{\"rate\": null}')", [queue])
        drain(conn)
        made.check()
        return made.counts


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 5))]
)
def test_all_options(dsn: str, conn: psycopg.Connection[Any], seed: int) -> None:
    counts = weather(dsn, conn, seed, 300)
    for call in ["defer_many", "fetch", "finish_many", "_admit", "retry"]:
        assert counts[f"queue.{call}"], call


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 140))
def test_all_options_for_long(dsn: str, conn: psycopg.Connection[Any], seed: int) -> None:
    weather(dsn, conn, seed, 3000)
