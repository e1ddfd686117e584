"""Tells how much memory processes use, and limits it while a handler runs in one.

Tests: integration/test_processes.py.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["cap", "capped", "resident"]

PROC = "/proc"


class _Cap:
    was_hit = False


#: The cap of this process.
cap = _Cap()


@contextlib.contextmanager
def capped(size: int | None) -> Iterator[None]:
    """Let allocations beyond `size` bytes of data in this process fail with MemoryError.

    The limit applies to the data segment as Linux counts it: private writable memory. Other systems
    count less, or ignore the limit.
    """
    if size is None:
        yield
        return
    import resource  # noqa: PLC0415 (not on every system)

    before = resource.getrlimit(resource.RLIMIT_DATA)
    soft = size if before[1] == resource.RLIM_INFINITY else min(size, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, (soft, before[1]))
    try:
        yield
    except MemoryError:
        cap.was_hit = True
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def resident(others: Iterable[int] = ()) -> int | None:
    """Return the resident bytes of this process and of others, by pid; None without Linux's /proc.

    Pages that several of them share count for each. A process that has ended counts nothing.
    """
    own = _resident("self")
    return own and own + sum(_resident(str(pid)) or 0 for pid in others)


def _resident(pid: str) -> int | None:
    try:
        pages = int(Path(PROC, pid, "statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
