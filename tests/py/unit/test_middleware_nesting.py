"""Middleware around a handler is entered and left as by nested `with` statements."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from pgdefer.tasks.middleware import AsyncEntered, Entered

HOWS = ("passes", "swallows", "raises", "refuses")


class Part:
    def __init__(self, number: int, how: str, seen: list[object]) -> None:
        self.name, self.how, self.seen = f"m{number}", how, seen

    def __enter__(self) -> None:
        self.seen.append(f"{self.name} enters")
        if self.how == "refuses":
            raise ValueError(f"{self.name} refuses")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.seen.append((self.name, kind, str(error), trace is not None))
        if self.how == "raises":
            raise KeyError(f"{self.name} raises")
        return self.how == "swallows"


class AsyncPart(Part):
    async def __aenter__(self) -> None:
        await asyncio.sleep(0)
        self.__enter__()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        await asyncio.sleep(0)
        return self.__exit__(kind, error, trace)


def described(error: BaseException | None) -> list[str]:
    """Return an error and those that it came from."""
    found = []
    while error is not None:
        found.append(f"{type(error).__name__}: {error}")
        error = error.__context__
    return found


def heads(seen: list[object]) -> list[object]:
    """Return what was seen, of an error at the end without those that it came from."""
    return [one[0] if isinstance(one, list) else one for one in seen]


def body(seen: list[object], *, fails: bool) -> None:
    seen.append("body")
    if fails:
        raise OSError("body")


def nested(parts: list[Part], seen: list[object], *, fails: bool) -> None:
    if not parts:
        body(seen, fails=fails)
        return
    with parts[0]:
        nested(parts[1:], seen, fails=fails)


async def outcome(hows: Any, kind: str, *, fails: bool) -> list[object]:
    """Return what happens in a block within middleware, or within nested statements."""
    seen: list[object] = []
    is_async = kind in ("async", "mixed")
    parts = [
        (AsyncPart if is_async and not (kind == "mixed" and number % 2) else Part)(
            number, how, seen
        )
        for number, how in enumerate(hows)
    ]
    middleware: Any = [lambda _, part=part: part for part in parts]
    job: Any = None
    try:
        if kind == "sync":
            with Entered(job, middleware):
                body(seen, fails=fails)
        elif kind == "nested":
            nested(parts, seen, fails=fails)
        else:
            async with AsyncEntered(job, middleware):
                body(seen, fails=fails)
    except Exception as error:
        seen.append(described(error))
    return seen


@pytest.mark.parametrize("kind", ["sync", "async", "mixed"])
def test_as_nested_statements(kind: str) -> None:
    for count in range(4):
        for hows in itertools.product(HOWS, repeat=count):
            for fails in (False, True):
                asked = (hows, fails)
                wanted = asyncio.run(outcome(hows, "nested", fails=fails))
                found = asyncio.run(outcome(hows, kind, fails=fails))
                refused = next((i for i, how in enumerate(hows) if how == "refuses"), None)
                if refused is not None and not isinstance(wanted[-1], list):
                    # Statements go on after the block; here the handler must not seem to have run.
                    assert isinstance(found[-1], list), asked
                    assert found.pop()[0].startswith("RuntimeError: a middleware"), asked  # type: ignore[index, attr-defined]
                if "swallows" in hows:  # the swallowed error may stay in the context of a later one
                    found, wanted = heads(found), heads(wanted)
                assert found == wanted, asked
