"""What can be said of a task or a job, in Python's types and as the SQL functions take it."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict, TypeVar

from ._errors import EncodeError

__all__ = ["DeferOptions", "RecurringOptions", "Retry", "TaskOptions", "interval_text"]

T = TypeVar("T")


class HasId(Protocol):
    """A job, as `defer` returns it."""

    @property
    def id(self) -> int:
        """The job's id."""


class _Unset(enum.Enum):
    """What stands for an option that isn't given, where None is a value of its own."""

    UNSET = "not given"

    def __repr__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True)
class Retry:
    """A retry policy; what isn't given is left to the database's default.

    `max_attempts` is at which failure to give up: None is never. The delay after the nth failure
    is `base`, `base * n` or `base * factor ** (n - 1)`, as `backoff` says, at most `cap`; `first`
    is that after the first one, if it differs: the series then starts with the second. `jitter`,
    from 0 to 1, shortens it at random by up to that share.

    Crashes are counted apart: `on_crash` says what one leads to, and at `max_crashes` the job
    fails (3; None: never).

    In Procrastinate's terms: `wait`, `linear_wait` and `exponential_wait` are seconds, and make
    `wait + linear_wait * n + exponential_wait ** (n + 1)` with n failures before this one.
    """

    max_attempts: int | None
    _: dataclasses.KW_ONLY
    backoff: Literal["constant", "linear", "exponential"] | None = None
    base: dt.timedelta | None = None
    factor: float | None = None
    cap: dt.timedelta | None = None
    first: dt.timedelta | None = None
    jitter: float | None = None
    on_crash: Literal["retry", "fail"] | None = None
    max_crashes: int | _Unset | None = _Unset.UNSET
    wait: float | None = None
    linear_wait: float | None = None
    exponential_wait: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the policy as queue.backoff takes it."""
        policy: dict[str, Any] = {"max_attempts": self.max_attempts}
        if self.max_crashes is None:
            policy["max_crashes"] = None
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and value is not _Unset.UNSET:
                policy[field.name] = interval_text(value) if field.type == _DELAY else value
        return policy


_DELAY = "dt.timedelta | None"

RetryPolicy = Retry | int | Mapping[str, Any]


class _Common(TypedDict, total=False):
    queue: str
    priority: int
    lock: str
    queueing_lock: str
    concurrency_key: str
    concurrency_limit: int
    on_conflict: Literal["raise", "ignore", "replace"]
    unique_until: Literal["start", "finish"]
    lock_mode: Literal["ordered", "mutex"]
    needs_mode: Literal["all", "any"]
    on_need_failure: Literal["block", "proceed"]
    on_limit: Literal["block", "discard"]
    retry: RetryPolicy | None
    timeout: dt.timedelta | None
    delay: dt.timedelta
    held: bool
    description: str
    headers: Mapping[str, Any]
    retain: dt.timedelta | None
    concurrency: Sequence[Mapping[str, Any]]
    max_progress: int | None


class TaskOptions(_Common, total=False):
    """What a task may register; `deadline` counts from the moment of deferring.

    None is as if not given, so that a default of the app's does not hold; for `max_progress` it is
    no limit.
    """

    deadline: dt.timedelta | None


class DeferOptions(_Common, total=False):
    """What a single job may say; it goes before what its task registered.

    An empty text means none. `needs` and `parent` are ids, or jobs as `defer` returned them;
    inside a handler `parent` is its job unless something else is given, None included.
    """

    scheduled_at: dt.datetime
    deadline: dt.datetime
    expires_at: dt.datetime
    needs: Iterable[int | HasId]
    parent: int | HasId | None


class RecurringOptions(_Common, total=False):
    """What a schedule may say of its jobs, and of its runs.

    `catch_up` is what becomes of runs that were missed while nobody looked or the queue was paused;
    `max_delay` skips runs that are later; `overlap="skip"` those that find the last job unfinished.
    `deadline` counts from the time that the run is for.
    """

    deadline: dt.timedelta
    expires_at: dt.datetime
    catch_up: Literal["none", "latest", "all"]
    max_delay: dt.timedelta
    overlap: Literal["allow", "skip"]
    enabled: bool


# Those that are arguments of queue.defer; the rest are keys of its `options`.
ARGUMENTS = frozenset(
    {
        "queue",
        "priority",
        "lock",
        "queueing_lock",
        "scheduled_at",
        "deadline",
        "needs",
        "concurrency_key",
        "concurrency_limit",
    }
)
NUMBERS = frozenset({"priority", "concurrency_limit"})
_NO_ARGUMENTS: dict[str, Any] = dict.fromkeys((*sorted(ARGUMENTS), "options"))


def interval_text(value: dt.timedelta) -> str:
    """Return an interval of exactly this length in PostgreSQL's syntax."""
    microseconds = value // dt.timedelta(microseconds=1)
    sign = "-" if microseconds < 0 else ""
    seconds, microseconds = divmod(abs(microseconds), 1_000_000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{sign}{hours}:{minutes:02}:{seconds:02}.{microseconds:06}"


def _instant(name: str, value: dt.datetime) -> str:
    if value.tzinfo is None:
        raise ValueError(f"{name} has no time zone: {value!r}")
    return value.isoformat()


def listed(name: str, values: Iterable[T]) -> list[T]:
    """Return a list. Raises TypeError for what is none, a text too: it would go by letters."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list, not {values!r}: give [{values!r}]")
    return list(values)


def job_id(job: int | HasId) -> int:
    """Return the id of a job or an id. Raises TypeError for what is neither."""
    id = job if isinstance(job, int) else getattr(job, "id", None)
    if not isinstance(id, int) or isinstance(id, bool):
        raise TypeError(f"a job, or its id as an int, is needed, not {job!r}")
    if not 0 <= id < 2**63:
        raise ValueError(f"{id} is no job's id")
    return id


def to_json(name: str, value: Any) -> Any:
    """Return one option as it stands in JSON."""
    match value:
        case dt.timedelta():
            return interval_text(value)
        case dt.datetime():
            return _instant(name, value)
        case Retry():
            return value.to_json()
        case int() if name == "retry" and not isinstance(value, bool):
            return {"max_attempts": value}
    if name == "needs":
        return [job_id(job) for job in listed(name, value)]
    if name in NUMBERS:
        return _number(name, value)
    if name == "parent":
        return job_id(value)
    if name == "concurrency":
        return [dict(item) for item in listed(name, value)]
    if name in ("headers", "retry"):
        return _mapping(name, value)
    return value


def _mapping(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping, not {value!r}")
    return dict(value)


def _number(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if not -(2**31) <= value < 2**31:
        raise ValueError(f"{name} must fit into 32 bits, not {value}")
    return value


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options in JSON's types: queue.defer's arguments, and the keys of its `options`."""

    arguments: Mapping[str, Any]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Sort what was given; None means not given, but for max_progress."""
        arguments: dict[str, Any] = {}
        options: dict[str, Any] = {}
        for name, value in given.items():
            if name in ARGUMENTS:
                if value is not None:
                    arguments[name] = to_json(name, value)
            elif value is not None or name == "max_progress":
                options[name] = to_json(name, value)
        return cls(arguments, options)

    def defaults(self) -> dict[str, Any]:
        """Return the defaults that queue.register_task takes."""
        return {**self.arguments, **self.options}

    def options_text(self) -> str | None:
        """Return the JSON text of `options`, None without any."""
        if not self.options:
            return None
        try:
            return json.dumps(self.options, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise EncodeError(f"the options can't be stored: {error}") from error


def defer_parameters(task: str, args: str, settings: Settings) -> dict[str, Any] | None:
    """Return the parameters of _sql.DEFER; None where task and args are all there is."""
    if not settings.arguments and not settings.options:
        return None
    return {
        **_NO_ARGUMENTS,
        **settings.arguments,
        "options": settings.options_text(),
        "task": task,
        "args": args,
    }


def defer_object(task: str, args: str, settings: Settings) -> str:
    """Return one object of queue.defer_many's array."""
    rest = dict(settings.arguments)
    if settings.options:
        rest["options"] = settings.options
    try:
        head = json.dumps({"task": task, **rest}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise EncodeError(f"the options can't be stored: {error}") from error
    return f'{head[:-1]}, "args": {args}}}'
