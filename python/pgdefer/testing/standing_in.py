"""A test's queue in place of a client's calls, alone or within the block of another queue.

Tests: integration/test_memory_queue.py, integration/test_testing.py.
"""

from __future__ import annotations

from typing import Any

from pgdefer.client.client import Client

__all__ = ["StandingIn"]


class StandingIn:
    """Stands in for a client until it leaves. Nested queues may leave in any order."""

    _is_in = False
    _before: Any = None

    def _stand_in_for(self, client: Client) -> None:
        if self._is_in:
            raise RuntimeError("this queue is in use already: make another one for a block within")
        self._is_in, self._before = True, client.stand_in
        client.stand_in = self  # type: ignore[assignment]

    def _leave(self, client: Client) -> None:
        """Restore what was there before, or let a queue within this one restore that later."""
        inner: Any = client.stand_in
        if inner is self:
            client.stand_in = self._before
        while isinstance(inner, StandingIn):
            if inner._before is self:
                inner._before = self._before
            inner = inner._before
        self._is_in, self._before = False, None
