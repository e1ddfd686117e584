"""How a claim ended, as one JSON object for queue.finish_many and queue.finish_and_fetch."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from typing import Any

from ._codec import TAG, UNENCODABLE, Codec
from ._context import RetryLater
from ._errors import PgDeferError
from ._options import job_id

__all__ = ["aborted", "crashed", "failed", "released", "retry_later", "succeeded"]

MAX_MESSAGE = 2_000
MAX_TRACEBACK = 16_000


def succeeded(id: int, claim: int, result: object = None, codec: Codec | None = None) -> str:
    """Return the outcome of a handler that returned `result`."""
    if result is None or codec is None:
        return f'{{"id":{id},"claim":{claim},"outcome":"succeeded"}}'
    text = result_text(result, codec)
    return f'{{"id":{id},"claim":{claim},"outcome":"succeeded","result":{text}}}'


def result_text(result: object, codec: Codec) -> str:
    """Return the JSON of a result, or of a note that it can't be stored."""
    try:
        return codec.dumps(result)
    except Exception:
        # What the job did stands; only whoever asks for its result must learn that there is none.
        kind = type(result)
        return json.dumps({TAG: UNENCODABLE, "value": f"{kind.__module__}.{kind.__qualname__}"})


def released(id: int, claim: int) -> str:
    """Return the outcome of a claim given back as if never made."""
    return f'{{"id":{id},"claim":{claim},"outcome":"released"}}'


def failed(
    id: int, claim: int, error: BaseException, options: Mapping[str, object] | None = None
) -> str:
    """Return the outcome of a handler that raised; `options` are queue.fail's."""
    return _failure("failed", id, claim, error, options)


def crashed(id: int, claim: int, error: BaseException) -> str:
    """Return the outcome of a handler whose process, or whose transaction, came to a sudden end."""
    return _failure("crashed", id, claim, error, None)


def aborted(id: int, claim: int, error: BaseException) -> str:
    """Return the outcome of a handler that ended because it was told to."""
    return _failure("aborted", id, claim, error, None)


def retry_later(id: int, claim: int, asked: RetryLater) -> str:
    """Return the outcome of a handler that yielded."""
    given = yield_parameters(id, claim, asked)
    outcome = {name: value for name, value in given.items() if value is not None}
    return json.dumps({**outcome, "needs": given["needs"], "outcome": "retry_later"})


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
    outcome: str, id: int, claim: int, error: BaseException, options: Mapping[str, object] | None
) -> str:
    kind = type(error).__qualname__
    try:
        message = str(error)
    except Exception as broken:
        message = f"(its text could not be made: {type(broken).__qualname__})"
    report: dict[str, object] = {
        "id": id,
        "claim": claim,
        "outcome": outcome,
        "error": storable(f"{kind}: {message}" if message else kind, MAX_MESSAGE),
        "details": {
            "type": storable(f"{type(error).__module__}.{kind}", MAX_MESSAGE),
            "message": storable(message, MAX_MESSAGE),
            "traceback": storable(_traceback(error), MAX_TRACEBACK, keep_end=True),
        },
    }
    if options:
        report["options"] = dict(options)
    return json.dumps(report)


def _traceback(error: BaseException) -> str:
    if isinstance(error, PgDeferError) and error.__traceback__ is None:
        return ""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:
        return ""


def storable(text: str, size: int, *, keep_end: bool = False) -> str:
    """Return the text without what jsonb refuses, and cut to `size` characters."""
    if len(text) > size:
        text = f"... {text[4 - size :]}" if keep_end else f"{text[: size - 4]} ..."
    return text.replace("\0", "\N{SYMBOL FOR NULL}").encode("utf-8", "replace").decode()
