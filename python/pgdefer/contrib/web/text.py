"""Texts of jobs, shown as text whatever they contain.

Tests: contrib/test_web.py.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["cut", "jobs_in", "moment", "plain"]

# Control characters, and those that change the direction or hide what follows.
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def plain(value: Any) -> str:
    """Return a text in which every character can be seen."""
    return "" if value is None else HIDDEN.sub(_visible, str(value))


def _visible(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else f"\\u{code:04x}"


def cut(value: Any, size: int) -> str:
    """Return at most so many characters of a text, and say so if there are more."""
    text = plain(value)
    return text if len(text) <= size else f"{text[:size]}\n… (cut)"


def jobs_in(text: str) -> list[tuple[str, str]]:
    """Return the parts of a text, each with the id of the job that follows it, if one does."""
    parts = re.split(r"(?<=\bjob )([0-9]{1,18})\b", text)
    return list(zip(parts[::2], [*parts[1::2], ""], strict=True))


def moment(value: str | None) -> str:
    """Return a time as the pages show it: UTC, to the second."""
    return "" if value is None else re.sub(r"(\.\d+)?\+00$", "", value)
