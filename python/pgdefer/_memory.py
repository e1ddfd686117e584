"""A limit on a process's memory while a handler runs in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["limited", "watch"]


class _Watch:
    has_run_out = False


watch = _Watch()


@contextlib.contextmanager
def limited(size: int | None) -> Iterator[None]:
    """Have allocations fail, with MemoryError, beyond `size` bytes of data in this process.

    What is counted is the data segment, as Linux does: private memory that can be written to. Other
    systems count less, or don't heed it.
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
        watch.has_run_out = True
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
