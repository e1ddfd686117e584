"""The jobs that filters select, for the list and for calls on all of them."""

from __future__ import annotations

from typing import Any

from . import queries
from .visit import Form, Visit

__all__ = ["asked_of", "find", "kept"]

FILTERS = ("state", "queue", "task", "by", "pattern")


def asked_of(form: Form) -> dict[str, Any]:
    """Return the filters in a URL or a form."""
    asked: dict[str, Any] = {name: form.maybe(name) for name in FILTERS}
    asked["by"] = asked["by"] or "text"
    return asked


def kept(asked: dict[str, Any]) -> dict[str, str]:
    """Return the filters that are set."""
    return {name: value for name, value in asked.items() if value is not None}


def find(
    visit: Visit, asked: dict[str, Any], before: int | None, most: int, max_bytes: int = 50_000_000
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Return the newest jobs below `before`, and where to continue if there may be more."""
    rows = visit.read(queries.JOBS, **asked, before=before, n=most, max_bytes=max_bytes)
    end = rows.pop() if rows and rows[-1]["id"] is None else None
    return rows, end
