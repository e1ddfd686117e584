"""The outcomes of claims, as JSON for queue.finish_many and queue.finish_and_fetch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pgdefer._text import escaped
from pgdefer.codec import TAG, UNENCODABLE
from pgdefer.options import job_id
from pgdefer.tasks.context import RetryLater
from pgdefer.tasks.error_report import (
    MAX_MESSAGE,
    error_details,
    error_text,
    kind_and_message,
    storable,
    storable_in,
)

__all__ = [
    "SUCCEEDED",
    "Settled",
    "aborted",
    "crashed",
    "failed",
    "headline",
    "is_success",
    "kind",
    "released",
    "retry_later",
    "storable_in",
    "succeeded",
    "unencodable",
    "with_steps",
    "without_decision",
    "without_result",
    "without_steps",
]

MAX_HEADLINE = 500


@dataclasses.dataclass(frozen=True)
class Settled:
    """Stands in for an outcome where the database has already ended the claim: how it ended.

    `kind` is what queue.attempts calls it, or `succeeded`; `state` is the job's state afterwards.
    """

    kind: str
    state: str
    error: str = ""


SUCCEEDED = Settled("succeeded", "succeeded")


def succeeded(id: int, claim: int, result: str | None = None) -> str:
    """Return the outcome of a handler that returned this result, in JSON; None for None."""
    if result is None:
        return f'{{"id":{id},"claim":{claim},"outcome":"succeeded"}}'
    return f'{{"id":{id},"claim":{claim},"outcome":"succeeded","result":{result}}}'


# Users' values are in compact JSON, without this space after the comma, so none contains this.
STEPS = ', "steps":['


def with_steps(outcome: str, steps: Sequence[str]) -> str:
    """Return an outcome with finished steps, each in JSON, to store with it."""
    return f"{outcome[:-1]}{STEPS}{','.join(steps)}]}}" if steps else outcome


def without_steps(outcome: str) -> str:
    """Return an outcome without steps: they run again if the job does."""
    bare, found, _ = outcome.rpartition(STEPS)
    return f"{bare}}}" if found else outcome


def without_decision(outcome: str) -> tuple[str, str] | None:
    """Return a failure without the task's decision, and the decision in JSON; None without one.

    The failure keeps its kind, and whether to retry.
    """
    steps = outcome[len(without_steps(outcome)) - 1 :]
    said = json.loads(without_steps(outcome))
    options = said.get("options") or {}
    kept = {
        name: value
        for name, value in options.items()
        if name == "outcome" or (name == "retryable" and isinstance(value, bool))
    }
    if kept == options:
        return None
    said["options"] = kept
    return _dumps(said)[:-1] + steps, json.dumps(options)


def is_success(outcome: str) -> bool:
    """Whether an outcome was made by `succeeded`."""
    return outcome.find('"outcome":"succeeded"', 0, 80) >= 0


def kind(said: Mapping[str, Any]) -> str:
    """Return what queue.attempts calls a decoded outcome."""
    found = str((said.get("options") or {}).get("outcome", said["outcome"]))
    return "yielded" if found == "retry_later" else found


def unencodable(kind: str, why: str | None = None) -> str:
    """Return the JSON that replaces a result that can't be stored, of a type with this name."""
    return json.dumps({TAG: UNENCODABLE, "value": kind} | ({} if why is None else {"why": why}))


def released(id: int, claim: int) -> str:
    """Return the outcome of a claim that is given back as if it had never been made."""
    return f'{{"id":{id},"claim":{claim},"outcome":"released"}}'


def failed(
    id: int,
    claim: int,
    error: BaseException,
    options: Mapping[str, object] | None = None,
    said: str | None = None,
) -> str:
    """Return the outcome of a handler that raised; `options` are queue.fail's.

    The job's error is the text `said`, or else the type and message of `error`.
    """
    return _failure("failed", id, claim, error, options, said=said)


def crashed(id: int, claim: int, error: BaseException) -> str:
    """Return the outcome of a handler whose process or transaction ended unexpectedly."""
    return _failure("crashed", id, claim, error, None)


def aborted(id: int, claim: int, error: BaseException) -> str:
    """Return the outcome of a handler that ended because it was told to."""
    return _failure("aborted", id, claim, error, None)


def retry_later(id: int, claim: int, asked: RetryLater) -> str:
    """Return the outcome of a handler that yielded."""
    parameters = yield_parameters(id, claim, asked)
    outcome = {name: value for name, value in parameters.items() if value is not None}
    return _dumps({**outcome, "needs": parameters["needs"], "outcome": "retry_later"})


def yield_parameters(id: int, claim: int, asked: RetryLater) -> dict[str, Any]:
    """Return the parameters of queue.retry_later."""
    return {
        "id": id,
        "claim": claim,
        "at": None if asked.at is None else asked.at.isoformat(),
        "needs": None if asked.needs is None else [job_id(need) for need in asked.needs],
        "message": storable(asked.message, MAX_MESSAGE) if asked.message else None,
    }


def _failure(
    outcome: str,
    id: int,
    claim: int,
    error: BaseException,
    options: Mapping[str, object] | None,
    *,
    said: str | None = None,
) -> str:
    report: dict[str, object] = {
        "id": id,
        "claim": claim,
        "outcome": outcome,
        "error": error_text(error) if said is None else storable(said, MAX_MESSAGE),
        "details": error_details(error),
    }
    if options:
        report["options"] = dict(options)
    return _dumps(report)


def _dumps(outcome: Mapping[str, object]) -> str:
    """Return JSON without escapes: a database in SQL_ASCII can't decode those above ASCII."""
    text = json.dumps(outcome, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(outcome)
    return text


def without_result(outcome: str, id: int, claim: int) -> str | None:
    """Return a success with a note that its result can't be stored; None for any other outcome."""
    if not outcome.startswith(succeeded(id, claim)[:-1] + ',"result":'):
        return None
    return succeeded(id, claim, unencodable("JSON, which this database can't hold"))


def headline(error: BaseException) -> str:
    """Return an error's first line, for the log."""
    kind, message = kind_and_message(error)
    line = (message.splitlines() or [""])[0]
    return escaped(storable(f"{kind}: {line}" if line else kind, MAX_HEADLINE))
