"""Checks the options of tasks, schedules and jobs, so that errors come where the code gives them.

Tests: unit/test_misuse.py, integration/test_wrong_usages.py.
"""

from __future__ import annotations

import datetime as dt
import difflib
import functools
import re
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

from pgdefer.options import ENDED, IN_TEMPLATES

__all__ = ["check_cron", "check_options", "check_sensitive", "check_templates"]

# The greatest value of each field of a cron expression, beginning with the seconds.
FIELD_MAXIMA = (59, 59, 23, 31, 12, 7)
NICKNAMES = ("@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually")


# What other queues call these options.
_OF_OTHERS = {
    "countdown": "delay",
    "eta": "scheduled_at",
    "expires": "expires_at",
    "max_attempts": "retry",
    "max_retries": "retry",
    "rate_limit": "concurrency",
    "schedule_at": "scheduled_at",
    "schedule_in": "delay",
    "time_limit": "timeout",
}

# What to do in place of other options that they have.
_IN_PLACE_OF = {
    "bind": "use pgdefer.current_job() in the handler",
    "pass_context": "use pgdefer.current_job() in the handler",
    "task_kwargs": "pass all arguments to defer",
}

# The types of options that are checked here, in words.
_KINDS: dict[Any, str] = {
    dt.timedelta: "a timedelta",
    dt.datetime: "a datetime with a time zone",
    str: "text",
    bool: "True or False",
}


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def check_options(
    what: str, options: Mapping[str, Any], *kinds: type, besides: Collection[str] = ()
) -> None:
    """Raise TypeError or ValueError for options that these TypedDicts lack, or that are invalid.

    `besides` are the other arguments of the call: a misspelt option may be one of them.
    """
    hints: dict[str, Any] = {}
    for kind in kinds:
        hints |= _hints(kind)
    for name, value in options.items():
        if name not in hints:
            known = {*hints, *besides}
            near = _OF_OTHERS.get(name) or "".join(difflib.get_close_matches(name, known, 1))
            meant = _IN_PLACE_OF.get(name) or (
                f"did you mean {near}?" if near in known else "it takes " + ", ".join(sorted(known))
            )
            raise TypeError(f"{what} takes no option {name}: {meant}")
        _check_value(what, name, value, hints[name])
    if "delay" in options and options.get("scheduled_at") is not None:
        raise ValueError(f"{what}: pass delay or scheduled_at, not both")


def _check_value(what: str, name: str, value: Any, hint: Any) -> None:
    if name == "retry" and isinstance(value, int):
        _check_retry(what, value)
    if name == "retain":
        _check_retain(what, value)
        return
    choices = hint.__args__ if isinstance(hint, types.UnionType) else [hint]
    kinds = [choice for choice in choices if choice is not type(None)]
    if value is None or len(kinds) > 1:
        return
    (kind,) = kinds
    if typing.get_origin(kind) is typing.Literal:
        allowed = typing.get_args(kind)
        if value not in allowed:
            shown = ", ".join(map(repr, allowed))
            raise ValueError(f"{what}: {name} must be one of {shown}, not {value!r}")
    elif kind in _KINDS:
        if not isinstance(value, kind):
            raise TypeError(f"{what}: {name} must be {_KINDS[kind]}, not {value!r}")
        if kind is str:
            _check_encodable(what, name, value)


def _check_encodable(what: str, name: str, value: str) -> None:
    """Refuse text that can't be sent to a database, such as a file name that is not UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what}: {name} is no text, but half of a character: {value!r}"
        ) from error


def _check_retain(what: str, value: Any) -> None:
    """Refuse anything but an interval, or intervals by outcome."""
    if not isinstance(value, Mapping):
        if value is not None and not isinstance(value, dt.timedelta):
            raise TypeError(f"{what}: retain must be a timedelta, not {value!r}")
        return
    for outcome, each in value.items():
        if outcome not in ENDED:
            raise ValueError(f"{what}: retain has the outcome {outcome!r}: give {', '.join(ENDED)}")
        _check_value(what, f"retain[{outcome!r}]", each, dt.timedelta)


def _check_retry(what: str, value: int) -> None:
    """Refuse values that mean something else in other job queues."""
    if isinstance(value, bool):
        meant = "Retry(None) is for ever, retry=5 is 5 attempts" if value else "None is none"
        raise TypeError(f"{what}: retry={value} does not say how often: {meant}")
    if value < 2:
        said = "is one attempt, and so no retry" if value == 1 else "is a number of attempts"
        raise ValueError(
            f"{what}: retry={value} {said}: write retry=2 for one retry, or retry=Retry(1) for none"
        )


_TEMPLATES = ("lock", "queueing_lock", "concurrency_key", "idempotency_key", "share", "group")


def check_templates(what: str, options: Mapping[str, Any], arguments: Collection[str]) -> None:
    """Raise ValueError if a lock, key, share or group has a {field} that no call could fill."""
    templates = [(name, options.get(name)) for name in _TEMPLATES]
    templates += [
        ("a key of concurrency", each.get("key")) for each in options.get("concurrency") or ()
    ]
    for name, template in templates:
        for found in IN_TEMPLATES.finditer(template if isinstance(template, str) else ""):
            field = found[1]
            # a run of a schedule also has its time
            if field is not None and field not in arguments and field != "scheduled_for":
                takes = ", ".join(sorted(arguments)) or "none"
                raise ValueError(
                    f"{what}: {name} names {{{field}}}, which is no argument: it takes {takes}"
                )


def check_sensitive(what: str, options: Mapping[str, Any], arguments: Collection[str]) -> None:
    """Raise ValueError if a sensitive path begins with no argument, and so hides nothing."""
    for path in options.get("sensitive") or ():
        name = re.match(r"(\w+)(?=[.[]|$)", str(path))  # the database checks the rest
        if name is not None and name[1] not in arguments:
            takes = ", ".join(sorted(arguments)) or "none"
            raise ValueError(
                f"{what}: sensitive names {name[1]!r}, which is no argument: it takes {takes}"
            )


def check_cron(what: str, cron: Any) -> None:
    """Raise ValueError for an obviously wrong cron expression; the database checks the rest."""
    if not isinstance(cron, str) or not cron.strip():
        raise ValueError(
            f"{what}: a cron expression, or text such as 'every 5 minutes', is needed, not {cron!r}"
        )
    text = cron.strip()
    if text.startswith("@"):
        if text.lower() not in NICKNAMES:
            raise ValueError(f"{what}: {cron!r} is none of {', '.join(NICKNAMES)}")
        return
    if text.lower().startswith("every"):
        return
    fields = text.split()
    if len(fields) not in (5, 6):
        raise ValueError(
            f"{what}: {cron!r} has {len(fields)} fields: a cron expression has 5, or 6 with the "
            "seconds first"
        )
    for field, last in zip(fields, FIELD_MAXIMA[-len(fields) :], strict=True):
        for number in re.findall(r"(?<![/\d])\d+", field):
            if int(number) > last:
                raise ValueError(f"{what}: {number} in {cron!r} is above {last}")
