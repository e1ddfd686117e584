"""An error as the database stores it: its text, and its details."""

from __future__ import annotations

import traceback

from pgdefer.errors import PgDeferError

__all__ = [
    "MAX_MESSAGE",
    "MAX_TRACEBACK",
    "error_details",
    "error_text",
    "kind_and_message",
    "storable",
]

MAX_MESSAGE = 2_000
MAX_TRACEBACK = 16_000


def error_text(error: BaseException) -> str:
    """Return an error's type and message, as a job's error."""
    kind, message = kind_and_message(error)
    return storable(f"{kind}: {message}" if message else kind, MAX_MESSAGE)


def error_details(error: BaseException) -> dict[str, object]:
    """Return the details of an attempt that ended by an error."""
    kind, message = kind_and_message(error)
    return {
        "type": storable(f"{type(error).__module__}.{kind}", MAX_MESSAGE),
        "message": storable(message, MAX_MESSAGE),
        "traceback": storable(_traceback(error), MAX_TRACEBACK, keep_end=True),
    }


def kind_and_message(error: BaseException) -> tuple[str, str]:
    """Return the name of an error's type, and its text."""
    try:
        message = str(error)
    except Exception as broken:
        message = f"(its text could not be made: {type(broken).__qualname__})"
    return type(error).__qualname__, message


def _traceback(error: BaseException) -> str:
    if isinstance(error, PgDeferError) and error.__traceback__ is None:
        return ""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:
        return ""


def storable(text: str, size: int, *, keep_end: bool = False) -> str:
    """Return the text without characters that jsonb refuses, cut to `size` characters."""
    if len(text) > size:
        text = f"... {text[4 - size :]}" if keep_end else f"{text[: size - 4]} ..."
    return text.replace("\0", "\N{SYMBOL FOR NULL}").encode("utf-8", "replace").decode()
