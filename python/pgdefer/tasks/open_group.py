"""A group with a name, which jobs join until it is closed.

Tests: integration/test_groups.py.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from pgdefer.client.client import Client
from pgdefer.database import sql
from pgdefer.database.callers import OWN, AnyAsyncConnection, AnyConnection, CallersConnection

__all__ = ["OpenGroup"]


class OpenGroup:
    """A group that jobs join by `group=name`: `App.open_group` returns it.

    As a context manager, it closes the group at the end of the block. After an exception the group
    stays open, so that another run of the program can add what is missing.
    """

    def __init__(
        self, client: Client, name: str, is_new: bool, connection: CallersConnection
    ) -> None:
        self._client = client
        self._connection = connection
        self.name = name
        #: Whether `App.open_group` has created it; False if it was open before.
        self.is_new = is_new

    def __repr__(self) -> str:
        return f"OpenGroup({self.name!r})"

    def close(self, *, connection: AnyConnection = OWN) -> bool:
        """Close the group; return False if it was closed before."""
        rows = self._client.call(sql.CLOSE_GROUP, {"name": self.name}, connection)
        return bool(rows[0][0])

    async def close_async(self, *, connection: AnyAsyncConnection = OWN) -> bool:
        """Close the group; return False if it was closed before."""
        rows = await self._client.call_async(sql.CLOSE_GROUP, {"name": self.name}, connection)
        return bool(rows[0][0])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self._client.call(sql.CLOSE_GROUP, {"name": self.name}, self._connection)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            await self._client.call_async(sql.CLOSE_GROUP, {"name": self.name}, self._connection)
