"""Lets a few through at a time.

Tests: integration/test_many_databases.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Hashable

__all__ = ["Turn", "Turnstile"]

Turn = Callable[[], contextlib.AbstractAsyncContextManager[None]]

# How long one may keep others waiting, in seconds.
PATIENCE = 1.0


class Turnstile:
    """Lets `most` workers at a time into a block, and `of_one` of those that go to one server.

    A server that many workers reach at once answers all of them late. Workers that have been in the
    block for a second no longer count. So a server that does not answer delays its other workers
    only for that long, and those of other servers hardly at all.
    """

    def __init__(self, most: int, of_one: int) -> None:
        self._turns = asyncio.Semaphore(most)
        self._of_one = of_one
        self._of_servers: dict[Hashable, asyncio.Semaphore] = {}

    @contextlib.asynccontextmanager
    async def entered(self, server: Hashable) -> AsyncIterator[None]:
        """Wait for a turn."""
        own = self._of_servers.setdefault(server, asyncio.Semaphore(self._of_one))
        async with _turn_of(own), _turn_of(self._turns):
            yield


@contextlib.asynccontextmanager
async def _turn_of(turns: asyncio.Semaphore) -> AsyncIterator[None]:
    await turns.acquire()
    is_held = True

    def release() -> None:
        nonlocal is_held
        if is_held:
            is_held = False
            turns.release()

    timer = asyncio.get_running_loop().call_later(PATIENCE, release)
    try:
        yield
    finally:
        timer.cancel()
        release()
