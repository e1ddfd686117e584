"""An error as the database stores it: its text, and its details.

Tests: unit/test_outcomes.py.
"""

from __future__ import annotations

import json
import re
import traceback

from psycopg._encodings import py_codecs

from pgdefer._text import full_type_name, type_name
from pgdefer.errors import PgDeferError

__all__ = [
    "MAX_MESSAGE",
    "MAX_TRACEBACK",
    "error_details",
    "error_text",
    "kind_and_message",
    "storable",
    "storable_in",
]

MAX_MESSAGE = 2_000
MAX_TRACEBACK = 16_000


def error_text(error: BaseException) -> str:
    """Return an error's type and message, as a job's error."""
    kind, message = kind_and_message(error)
    return storable(f"{kind}: {message}" if message else kind, MAX_MESSAGE)


def error_details(error: BaseException) -> dict[str, object]:
    """Return the details of an attempt that ended by an error."""
    _, message = kind_and_message(error)
    return {
        "type": storable(full_type_name(error), MAX_MESSAGE),
        "message": storable(message, MAX_MESSAGE),
        "traceback": storable(_traceback(error), MAX_TRACEBACK, keep_end=True),
    }


def kind_and_message(error: BaseException) -> tuple[str, str]:
    """Return the name of an error's type, and its text, even if `str(error)` raises."""
    try:
        message = str.__str__(str(error))
    except BaseException as broken:
        message = f"(its text could not be made: {type_name(broken)})"
    return type_name(error), message


def _traceback(error: BaseException) -> str:
    try:
        if isinstance(error, PgDeferError) and error.__traceback__ is None:
            return ""
        return "".join(traceback.format_exception(error))
    except BaseException:
        return ""


def storable(text: str, size: int, *, keep_end: bool = False) -> str:
    """Return the text without characters that jsonb refuses, cut to `size` characters."""
    if len(text) > size:
        text = f"... {text[4 - size :]}" if keep_end else f"{text[: size - 4]} ..."
    return text.replace("\0", "\N{SYMBOL FOR NULL}").encode("utf-8", "replace").decode()


_ESCAPE_OR_ABOVE_ASCII = re.compile(
    r"""\\(?: u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2} | u[0-9a-fA-F]{4} | . )
      | [^\x00-\x7f]""",
    re.VERBOSE,
)


def storable_in(text: str, encoding: str) -> str:
    """Return JSON with Python escapes for characters that a database's encoding lacks.

    `encoding` is PostgreSQL's name for the encoding. If Python does not know that, all characters
    beyond ASCII are escaped.
    """
    codec = "utf-8" if encoding == "SQL_ASCII" else py_codecs.get(encoding.encode(), "ascii")

    def fitted(found: re.Match[str]) -> str:
        part = found[0]
        if part == "\\u0000":
            return "\\\\x00"
        character: str = json.loads(f'"{part}"')
        if character.isascii():
            return part
        try:
            character.encode(codec)
        except UnicodeEncodeError:
            escaped = character.encode("ascii", "backslashreplace").decode()
            return escaped.replace("\\", "\\\\")
        return character

    return _ESCAPE_OR_ABOVE_ASCII.sub(fitted, text)
