"""Work that is finished even if the coroutine that waits for it is cancelled.

Tests: integration/test_worker_stops.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

__all__ = ["run_shielded"]


async def run_shielded(close: Callable[[], Awaitable[object]]) -> None:
    """Call a function that ends by itself, wait for its end, and only then raise CancelledError.

    asyncio.shield does not suffice: asyncio.run cancels all tasks, the function's too. The function
    is then called again.
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
