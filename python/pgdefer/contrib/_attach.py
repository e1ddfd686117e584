"""Puts middleware around the present and future tasks of an App, once.

Tests: integration/test_telemetry.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from pgdefer.app import App
from pgdefer.tasks.context import Middleware
from pgdefer.tasks.deferral import DeferMiddleware

__all__ = ["attach", "claim"]

_claimed: weakref.WeakKeyDictionary[App, set[str]] = weakref.WeakKeyDictionary()


def claim(app: App, name: str) -> None:
    """Raise RuntimeError if a package of this name instruments the App already."""
    names = _claimed.setdefault(app, set())
    if name in names:
        raise RuntimeError(f"pgdefer.contrib.{name} instruments this App already")
    names.add(name)


def attach(
    app: App,
    *,
    middleware: Middleware | None = None,
    defer_middleware: DeferMiddleware | None = None,
    headers: Callable[[str], Mapping[str, Any]] | None = None,
) -> None:
    """Add middleware outside of the App's own, and further headers."""
    client = app.client
    if middleware is not None:
        client.middleware = (middleware, *client.middleware)
        for task in set(app.tasks.values()):
            task.middleware = (middleware, *task.middleware)
    if defer_middleware is not None:
        client.defer_middleware = (defer_middleware, *client.defer_middleware)
    if headers is not None:
        before, more = client.headers, headers
        client.headers = lambda task: {**(before(task) if before else {}), **more(task)}
