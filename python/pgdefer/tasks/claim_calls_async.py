"""What a running job asks with its claim: its needs, attempts left, a longer lease.

Tests: integration/test_failures.py, integration/test_announcer.py.
"""

from __future__ import annotations

import datetime as dt

from pgdefer.client.client import Client
from pgdefer.database import sql
from pgdefer.options import checked_interval
from pgdefer.tasks.need import Need

__all__ = ["attempts_left_async", "extend_async", "needs_async"]


async def needs_async(client: Client, id: int) -> list[Need]:
    """Return the jobs that a job needs, by id, in their present states.

    Raises JobNotFound, and DecodeError if a result can't be decoded.
    """
    rows = await client.call_async(sql.NEEDS, {"id": id})
    decode_async = client.codec.decode_async
    return [
        Need(id, task, state, await decode_async(result), why)
        for id, task, state, result, why in rows
    ]


async def extend_async(client: Client, id: int, claim: int, lease: dt.timedelta) -> dt.datetime:
    """Give a claim its own lease, and return when that ends. Raises ClaimLost."""
    parameters = {"id": id, "claim": claim, "lease": checked_interval("lease", lease)}
    rows = await client.call_async(sql.EXTEND, parameters)
    end: dt.datetime = rows[0][0]
    return end


async def attempts_left_async(client: Client, id: int, claim: int) -> tuple[int | None, bool]:
    """Return after how many failures a job fails for good, and whether one now would be the last.

    The number is None if there is no limit.
    """
    rows = await client.call_async(sql.ATTEMPTS_LEFT, {"id": id, "claim": claim})
    ((max_attempts, _, is_last),) = rows
    return max_attempts, is_last
