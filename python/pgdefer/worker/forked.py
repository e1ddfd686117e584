"""The end of processes that a handler forks by os.fork()."""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn, Self

__all__ = ["EndedIfForked"]


class EndedIfForked:
    """A block around a handler: a process that is forked within it ends where it leaves the block.

    Otherwise it would go on as a second copy of the worker, with the same claims and connections.
    Its exit code is 0, that of SystemExit, or 1 after any other exception.
    """

    __slots__ = ("_pid",)

    def __enter__(self) -> Self:
        self._pid = os.getpid()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if os.getpid() != self._pid:
            _end(error)


def _end(error: BaseException | None) -> NoReturn:
    code = error.code if isinstance(error, SystemExit) else error
    try:
        if isinstance(code, BaseException):
            traceback.print_exception(code)
        elif code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))
