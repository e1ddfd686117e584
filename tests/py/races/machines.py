"""State machines of hypothesis, each of whose runs has a database of its own."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import psycopg
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, get_state_machine_test

from pgdefer.database.embedded import EmbeddedServer
from support import create_database

PROFILE = settings(
    deadline=None,
    database=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)


@contextlib.contextmanager
def with_databases(
    machine: type[RuleBasedStateMachine], server: EmbeddedServer, template: str, name: str
) -> Iterator[type[RuleBasedStateMachine]]:
    """Provide the machine with new_dsn(), which creates a run's database and drops the last one's."""
    numbers = itertools.count(1)

    def drop(n: int) -> None:
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as conn:
            conn.execute(f"drop database if exists {name}_{n} with (force)".encode())

    def new_dsn() -> str:
        n = next(numbers)
        drop(n - 1)
        create_database(server, f"{name}_{n}", template)
        return server.dsn(f"{name}_{n}")

    yield type("Made", (machine,), {"new_dsn": staticmethod(new_dsn)})
    drop(next(numbers) - 1)


def short(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    """Run the machine, each time with the same choices."""
    chosen = settings(PROFILE, derandomize=True, max_examples=examples, stateful_step_count=steps)
    get_state_machine_test(machine, settings=chosen)()


def thorough(machine: type[RuleBasedStateMachine], number: int, steps: int = 80) -> None:
    """Run the machine 100 times, with the choices of this number."""
    chosen = settings(PROFILE, max_examples=100, stateful_step_count=steps)
    seed(number)(get_state_machine_test(machine, settings=chosen))()


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern is this name, or prefix* of it."""
    return pattern == name or (pattern[-1] == "*" and name.startswith(pattern[:-1]))
