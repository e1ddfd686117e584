"""Limits a process's memory while a handler runs in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["cap", "capped"]


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
