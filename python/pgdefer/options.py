"""The options of tasks and jobs, in Python's types and in the form of the SQL functions.

Tests: unit/test_task.py, unit/test_misuse.py.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict, TypeVar

from pgdefer.checks import MAX_INTEGER, check_number
from pgdefer.errors import EncodeError

__all__ = ["DeferOptions", "RecurringOptions", "Retry", "TaskOptions", "interval_text"]

T = TypeVar("T")

# The states of jobs that have ended, and all states.
ENDED = ("succeeded", "failed", "cancelled")
STATES = ("scheduled", "waiting", "upstream_failed", "blocked", "ready", "running", "held", *ENDED)


class HasId(Protocol):
    """A job, as `defer` returns it."""

    # An int. `Any`, because pyright takes the ids of models for SQLAlchemy's descriptors.
    @property
    def id(self) -> Any:
        """The job's id."""


class _Unset(enum.Enum):
    """Marks an option that is left out, where None is a value of its own."""

    UNSET = "not set"

    def __repr__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True)
class Retry:
    """A retry policy. The database has defaults for values that are left out.

    `max_attempts` is the number of failures at which the job fails; None means never. The delay
    after the nth failure is `base`, `base * n` or `base * factor ** (n - 1)`, depending on
    `backoff`, and at most `cap`. `first` replaces the delay after the first failure; the series
    then starts with the second. `jitter`, from 0 to 1, shortens each delay at random by up to that
    share of it.

    Crashes are counted separately: `on_crash` says what follows a crash, and at `max_crashes` the
    job fails (3 by default; None: never).

    Or give Procrastinate's `wait`, `linear_wait` and `exponential_wait`, in seconds: the delay is
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

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for an invalid policy."""
        for name in ("max_attempts", "max_crashes"):
            most = getattr(self, name)
            if most is not None and most is not _Unset.UNSET:
                check_number(f"Retry: {name}", most, int, at_least=1, at_most=_MOST)
        for name, allowed in (
            ("backoff", ("constant", "linear", "exponential")),
            ("on_crash", ("retry", "fail")),
        ):
            value = getattr(self, name)
            if value is not None and value not in allowed:
                shown = ", ".join(map(repr, allowed))
                raise ValueError(f"Retry: {name} must be one of {shown}, not {value!r}")
        for name in _DELAYS:
            checked_interval(f"Retry: {name}", getattr(self, name))
        for name in ("factor", "jitter", *_OF_PROCRASTINATE):
            if (value := getattr(self, name)) is not None:
                most = 1 if name == "jitter" else sys.float_info.max
                check_number(f"Retry: {name}", value, (int, float), at_least=0, at_most=most)
        mixed = [
            [name for name in kind if getattr(self, name) is not None]
            for kind in (_OF_PROCRASTINATE, ("backoff", "factor", *_DELAYS))
        ]
        if all(mixed):
            raise ValueError(f"Retry: {mixed[0][0]} and {mixed[1][0]} exclude each other")

    def as_options(self) -> dict[str, Any]:
        """Return the policy in the form of queue.backoff."""
        policy: dict[str, Any] = {"max_attempts": self.max_attempts}
        if self.max_crashes is None:
            policy["max_crashes"] = None
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and value is not _Unset.UNSET:
                policy[field.name] = interval_text(value) if field.name in _DELAYS else value
        return policy


_DELAYS = ("base", "cap", "first")
_OF_PROCRASTINATE = ("wait", "linear_wait", "exponential_wait")
# The greatest values that the database takes: of attempts and limits; of intervals (4,000 of its
# years, which have 12 months of 30 days); and the earliest and latest time.
_MOST = 999_999_999
_LONGEST = dt.timedelta(days=4000 * 12 * 30)
_FIRST = dt.datetime(1, 1, 3, tzinfo=dt.UTC)
_LAST = dt.datetime.max.replace(tzinfo=dt.UTC)

RetryPolicy = Retry | int | Mapping[str, Any]


class _Common(TypedDict, total=False):
    queue: str
    priority: int
    lock: str
    queueing_lock: str
    concurrency_key: str
    concurrency_limit: int
    on_conflict: Literal["raise", "ignore", "replace"]
    max_wait: dt.timedelta
    unique_until: Literal["start", "finish"]
    idempotency_key: str
    unique_for: dt.timedelta
    lock_mode: Literal["ordered", "mutex"]
    needs_mode: Literal["all", "any"]
    on_need_failure: Literal["block", "proceed"]
    on_limit: Literal["block", "discard"]
    share: str
    group: str
    retry: RetryPolicy | None
    timeout: dt.timedelta | None
    delay: dt.timedelta
    held: bool
    description: str
    headers: Mapping[str, Any]
    retain: dt.timedelta | Mapping[Literal["succeeded", "failed", "cancelled"], dt.timedelta] | None
    concurrency: Sequence[Mapping[str, Any]]
    max_progress: int | None


class TaskOptions(_Common, total=False):
    """The defaults that a task may register; `deadline` is relative to the call of defer.

    None leaves the option out, so that the app's default does not apply. For `max_progress` it
    means no limit. `sensitive` lists paths to arguments, such as `card.number` or
    `cards[*].number`, that nobody reads but workers and the owner of the queue.
    """

    deadline: dt.timedelta | None
    sensitive: Sequence[str] | None


class DeferOptions(_Common, total=False):
    """The options of a single job; they take precedence over the defaults of its task.

    An empty text means none. `needs` and `parent` are ids, or jobs as `defer` returned them.
    Inside a handler, `parent` is the handler's job by default; None means no parent.
    """

    scheduled_at: dt.datetime
    deadline: dt.datetime
    expires_at: dt.datetime
    needs: Iterable[int | HasId]
    parent: int | HasId | None


class RecurringOptions(_Common, total=False):
    """The options of a schedule, for its jobs and its runs.

    `catch_up` says which runs to make up for that were missed while no worker ran, or while the
    queue was paused. `max_delay` skips runs that are later than that; `overlap="skip"` skips runs
    while the last job is unfinished. `deadline` is relative to the time of the run.
    """

    deadline: dt.timedelta
    expires_at: dt.datetime
    catch_up: Literal["none", "latest", "all"]
    max_delay: dt.timedelta
    overlap: Literal["allow", "skip"]
    enabled: bool


# Arguments of queue.defer; the rest are keys of its `options`.
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
_NO_ARGUMENTS: dict[str, Any] = dict.fromkeys((*sorted(ARGUMENTS), "options"))


def interval_text(value: dt.timedelta) -> str:
    """Return an interval of exactly this length in PostgreSQL's syntax."""
    microseconds = value // dt.timedelta(microseconds=1)
    sign = "-" if microseconds < 0 else ""
    seconds, microseconds = divmod(abs(microseconds), 1_000_000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{sign}{hours}:{minutes:02}:{seconds:02}.{microseconds:06}"


def checked_interval(name: str, value: object) -> str | None:
    """Return an interval in PostgreSQL's syntax, None for None.

    Raises TypeError or ValueError, whose message begins with `name`.
    """
    if value is None:
        return None
    if not isinstance(value, dt.timedelta):
        raise TypeError(f"{name} must be a timedelta, not {value!r}")
    if not dt.timedelta(0) <= value <= _LONGEST:
        raise ValueError(f"{name} must be from 0 to 4,000 years, not {value}")
    return interval_text(value)


def settings_json(options: Mapping[str, Any]) -> str:
    """Return the JSON of the settings of a queue, key or share; intervals are timedeltas or text.

    Raises TypeError or ValueError.
    """

    def text(value: object) -> str | None:
        if isinstance(value, dt.timedelta):
            return checked_interval("an interval of the options", value)
        raise TypeError(f"the options take numbers, text, timedeltas and None, not {value!r}")

    given = checked_mapping("options", options)
    try:
        return json.dumps(given, default=text, allow_nan=False)
    except ValueError as error:
        json.dumps(given, default=text)  # raises what the conversion of another value has raised
        raise ValueError(f"the numbers of the options must be finite: {given!r}") from error


def checked_time(name: str, value: object) -> str | None:
    """Return a time as text, None for None. Raises as `checked_interval`."""
    if value is None:
        return None
    if not isinstance(value, dt.datetime):
        raise TypeError(f"{name} must be a datetime, not {value!r}")
    if value.tzinfo is None:
        raise ValueError(f"{name} has no time zone: {value!r}")
    if not _FIRST <= value <= _LAST:
        raise ValueError(f"{name} must be from 0001-01-03 to 9999-12-31 in UTC, not {value}")
    return value.isoformat()


def as_list(name: str, values: Iterable[T]) -> list[T]:
    """Return the values as a list. Raises TypeError if they are not iterable, or are a text."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list, not {values!r}: give [{values!r}]")
    return list(values)


def job_id(job: int | HasId) -> int:
    """Return the id of a job, or the id that was passed. Raises TypeError or ValueError."""
    id = job if isinstance(job, int) else getattr(job, "id", None)
    if isinstance(id, str) and id.isascii() and id.isdecimal():
        id = int(id)  # Django's TaskResult has it as text
    if not isinstance(id, int) or isinstance(id, bool):
        raise TypeError(f"a job, or its id as an int, is needed, not {job!r}")
    if not 0 <= id < 2**63:
        raise ValueError(f"{id} is no job's id")
    return id


# What a template may have: doubled braces, and fields, which are group 1.
IN_TEMPLATES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")


def ids_of(jobs: Iterable[int | HasId]) -> list[int]:
    """Return the ids of jobs. Raises TypeError or ValueError."""
    return [job_id(job) for job in as_list("jobs", jobs)]


def literal(text: str) -> str:
    """Return a template that stands for exactly this text: it has the braces doubled."""
    return text.replace("{", "{{").replace("}", "}}")


def limit_of_semaphore(key: str, slots: int | None) -> dict[str, Any]:
    """Return the options of a job that has a concurrency key of Solid Queue or Steady Queue.

    Without a semaphore (`slots` None) the limit is unknown, so it is 1: the default of
    limits_concurrency.
    """
    return {"concurrency_key": literal(key), "concurrency_limit": max(slots or 1, 1)}


# Intervals that can't be 0, and what holds if they are left out.
_LEFT_OUT = {"timeout": "no limit", "unique_for": "1 day"}


def checked_option(name: str, value: Any) -> Any:
    """Return the value of one option in JSON's types. Raises TypeError or ValueError."""
    convert = _CONVERSIONS.get(name)
    if convert is not None:
        return convert(name, value)
    match value:
        case dt.timedelta():
            text = checked_interval(name, value)
            if name in _LEFT_OUT and not value:
                raise ValueError(
                    f"{name} must be longer than 0: leave it out for {_LEFT_OUT[name]}"
                )
            return text
        case dt.datetime():
            return checked_time(name, value)
    return value


def checked_mapping(name: str, value: object) -> dict[str, Any]:
    """Return a mapping by names as a dict. Raises TypeError, whose message begins with `name`."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping, not {value!r}")
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"the names in {name} must be text, not {key!r}")
    return dict(value)


def _policy(name: str, value: object) -> dict[str, Any]:
    if isinstance(value, Retry):
        return value.as_options()
    if isinstance(value, int) and not isinstance(value, bool):
        return {"max_attempts": _number(name, value, 1, _MOST)}
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a number of attempts or a Retry(...), not {value!r}")
    known = [field.name for field in dataclasses.fields(Retry)]
    if unknown := sorted(map(str, value.keys() - set(known))):
        raise TypeError(f"{name} has no {', '.join(unknown)}: it has {', '.join(known)}")
    return _policy_of_mapping(value)


def _policy_of_mapping(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy whose delays may be seconds, or text that the database reads."""
    policy, rest = dict(value), {"max_attempts": None, **value}
    for name in _DELAYS:
        match rest.get(name):
            case str():
                del rest[name]
            case int() | float() as seconds:
                check_number(f"Retry: {name}", seconds, (int, float), at_least=0)
                del rest[name]
            case dt.timedelta() as delay:
                policy[name] = checked_interval(f"Retry: {name}", delay)
    Retry(**rest)
    return policy


def _number(
    name: str, value: object, least: int = -MAX_INTEGER - 1, most: int = MAX_INTEGER
) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be from {least} to {most}, not {value}")
    return value


def _by_outcome(name: str, value: object) -> object:
    if not isinstance(value, Mapping):
        return checked_interval(name, value) if isinstance(value, dt.timedelta) else value
    return {outcome: _by_outcome(name, each) for outcome, each in value.items()}


def _limits(name: str, value: object) -> list[dict[str, Any]]:
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        shown = repr(value) if isinstance(value, Mapping) else '{"key": ..., "limit": ...}'
        raise TypeError(f"{name} must be a list of mappings, not {value!r}: give [{shown}]")
    limits = [checked_mapping(f"each item of {name}", item) for item in as_list(name, value)]
    for limit in limits:
        numbers = [("limit", limit.get("limit")), ("weight", limit.get("weight"))]
        rate = limit.get("rate")
        if isinstance(rate, Mapping):
            numbers.append(("the rate's limit", rate.get("limit")))
            if isinstance(rate.get("per"), dt.timedelta):
                limit["rate"] = {**rate, "per": checked_interval(f"{name}: per", rate["per"])}
        for what, number in numbers:
            if number is not None:
                _number(f"{name}: {what}", number, 1, _MOST)
    return limits


_CONVERSIONS: Mapping[str, Callable[[str, Any], Any]] = {
    "concurrency": _limits,
    "headers": checked_mapping,
    "concurrency_limit": lambda name, value: _number(name, value, 1),
    "max_progress": lambda name, value: None if value is None else _number(name, value, 0, _MOST),
    "priority": _number,
    "needs": lambda name, value: [job_id(job) for job in as_list(name, value)],
    "parent": lambda _, value: job_id(value),
    "retain": _by_outcome,
    "retry": _policy,
    "sensitive": as_list,
}


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """Options in JSON's types: queue.defer's arguments, and the keys of its `options`."""

    arguments: Mapping[str, Any]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> JobOptions:
        """Sort the options into these two. Drop those that are None, except max_progress."""
        arguments: dict[str, Any] = {}
        options: dict[str, Any] = {}
        for name, value in values.items():
            if name in ARGUMENTS:
                if value is not None:
                    arguments[name] = checked_option(name, value)
            elif value is not None or name == "max_progress":
                options[name] = checked_option(name, value)
        return cls(arguments, options)

    def defaults(self) -> dict[str, Any]:
        """Return all of them in one dict, as queue.register_task takes them."""
        return {**self.arguments, **self.options}

    def options_text(self) -> str | None:
        """Return the JSON text of `options`, or None if there are none. Raises EncodeError."""
        if not self.options:
            return None
        try:
            return json.dumps(self.options, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise EncodeError(f"the options can't be stored: {error}") from error


def defer_parameters(task: str, args: str, job_options: JobOptions) -> dict[str, Any] | None:
    """Return the parameters of sql.DEFER, or None if there are only task and args."""
    if not job_options.arguments and not job_options.options:
        return None
    return {
        **_NO_ARGUMENTS,
        **job_options.arguments,
        "options": job_options.options_text(),
        "task": task,
        "args": args,
    }


def defer_object(task: str, args: str, job_options: JobOptions) -> str:
    """Return one object of queue.defer_many's array."""
    rest = dict(job_options.arguments)
    if job_options.options:
        rest["options"] = job_options.options
    try:
        head = json.dumps({"task": task, **rest}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise EncodeError(f"the options can't be stored: {error}") from error
    return f'{head[:-1]}, "args": {args}}}'
