"""Checks of single arguments: an error names the argument, and says what to give.

Tests: unit/test_misuse.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

__all__ = ["MAX_INTEGER", "check_flag", "check_number", "check_text", "check_texts"]

# The greatest number that the database takes.
MAX_INTEGER = 2**31 - 1

T = TypeVar("T")


def check_flag(name: str, value: object) -> None:
    """Raise TypeError unless the value is True or False.

    A text such as 'no', perhaps from an environment variable, would count as True.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")


def check_number(
    name: str, value: Any, kind: Any, *, at_least: float, at_most: float = MAX_INTEGER
) -> None:
    """Raise TypeError unless the value is a number of this kind, ValueError if out of range."""
    if not isinstance(value, kind) or isinstance(value, bool):
        what = "a whole number" if kind is int else "a number"
        raise TypeError(f"{name} must be {what}, not {value!r}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, not {value}")
    if not value <= at_most:  # NaN, too
        raise ValueError(f"{name} must be at most {at_most}, not {value}")


def check_text(name: str, value: object, such_as: str) -> None:
    """Raise TypeError unless the value is text, ValueError if it is empty."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be text, such as {such_as!r}, not {value!r}")
    if not value:
        raise ValueError(f"{name} is empty: give a text such as {such_as!r}, or leave it out")


def check_texts(name: str, values: Iterable[T], such_as: str) -> None:
    """Check each of these as `check_text` does."""
    for value in values:
        check_text(f"each of {name}", value, such_as)
