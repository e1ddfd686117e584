"""Work that goes on to its end when the coroutine that waits for it is cancelled.

Tests: integration/test_worker_stops.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

__all__ = ["to_the_end"]


async def to_the_end(close: Callable[[], Awaitable[object]]) -> None:
    """Call a function that has limits, and wait for its end; only then raise CancelledError.

    It is called again if its own task was cancelled, as asyncio.run cancels all.
    """
    cancelled: asyncio.CancelledError | None = None
    closing = asyncio.ensure_future(close())
    while True:
        try:
            await asyncio.wait([closing])
        except asyncio.CancelledError as error:
            cancelled = error
        if not closing.done():
            continue
        if not closing.cancelled():
            break
        closing = asyncio.ensure_future(close())
    closing.result()
    if cancelled is not None:
        raise cancelled
