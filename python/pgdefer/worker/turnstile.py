"""Lets a few through at a time.

Tests: integration/test_many_databases.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

__all__ = ["Turnstile"]

# Who takes longer than this, in seconds, no longer keeps others waiting.
PATIENCE = 1.0


class Turnstile:
    """Lets `most` at a time into a block, apart from those that have been in it for a second.

    A server that many workers reach at once answers all of them late; one that does not answer
    keeps nobody waiting for long.
    """

    def __init__(self, most: int) -> None:
        self._turns = asyncio.Semaphore(most)

    @contextlib.asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Wait for a turn."""
        await self._turns.acquire()
        is_held = True

        def release() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._turns.release()

        timer = asyncio.get_running_loop().call_later(PATIENCE, release)
        try:
            yield
        finally:
            timer.cancel()
            release()
