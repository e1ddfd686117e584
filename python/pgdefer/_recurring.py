"""Recurring runs, as the code states them; the database decides when they run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from ._errors import EncodeError
from ._options import Settings
from ._task import SCHEDULED_FOR, AsyncTask, SyncTask, Task
from ._text import logger

if TYPE_CHECKING:
    from ._app import App

__all__ = ["RecurringDecorator", "Schedule", "vanished"]

log = logger("pgdefer")

P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What queue.schedule is called with; `args` is JSON text."""

    name: str
    cron: str
    timezone: str
    task: str
    args: str
    options: Mapping[str, Any]

    def to_json(self, source: str) -> str:
        """Return the object that _sql.SCHEDULE takes."""
        rest = {
            "name": self.name,
            "cron": self.cron,
            "timezone": self.timezone,
            "task": self.task,
            "options": {**self.options, "source": source},
        }
        try:
            head = json.dumps(rest, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise EncodeError(f"the options can't be stored: {error}") from error
        return f'{head[:-1]}, "args": {self.args}}}'


def array(schedules: Iterable[Schedule], source: str) -> str:
    """Return the JSON text of _sql.SCHEDULE's parameter."""
    # Sorted, so that two processes that register the same meet in the same order.
    ordered = sorted(schedules, key=lambda schedule: schedule.name)
    return f"[{','.join(schedule.to_json(source) for schedule in ordered)}]"


def vanished(found: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the schedules that the database has and the code has not."""
    return sorted(set(found) - set(known))


class RecurringDecorator:
    """What `App.recurring(...)` returns."""

    def __init__(
        self,
        app: App,
        *,
        cron: str,
        timezone: str,
        name: str | None,
        args: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> None:
        self._app = app
        self._cron = cron
        self._timezone = timezone
        self._name = name
        self._args = args or {}
        self._options = options

    # A task is a function too.
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...
    def __call__(self, function: Callable[..., Any], /) -> Task[..., Any]:
        """Note the schedule; what is no task yet becomes one."""
        given: object = function
        task = given if isinstance(given, Task) else self._app.task(function)
        if SCHEDULED_FOR in self._args:
            raise TypeError(f"{SCHEDULED_FOR} is the run's own")
        named = dict(self._args)
        if SCHEDULED_FOR in task.parameters.required:
            named[SCHEDULED_FOR] = None
        bound = dict(task.parameters.bind((), named))
        bound.pop(SCHEDULED_FOR, None)
        schedule = Schedule(
            name=self._name or task.name,
            cron=self._cron,
            timezone=self._timezone,
            task=task.name,
            args=self._app.codec.dumps_args(bound),
            options=Settings.of(self._options).defaults(),
        )
        taken, number = self._app.schedules, 1
        while taken.get(schedule.name, schedule) != schedule:
            if self._name is not None:
                raise ValueError(f"there are two schedules named {self._name!r}")
            number += 1
            schedule = dataclasses.replace(schedule, name=f"{task.name}#{number}")
        taken[schedule.name] = schedule
        return task
