"""The versions of a task's arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pgdefer.codec import VERSION, unwrap
from pgdefer.errors import DecodeError

__all__ = ["UpgradeT", "Versions"]

Upgrade = Callable[[dict[str, Any], int], Mapping[str, Any]]
UpgradeT = TypeVar("UpgradeT", bound=Upgrade)

MAX_VERSION = 2**31 - 1


@dataclasses.dataclass
class Versions:
    """The versions of arguments that the code of a task understands."""

    oldest: int = 1
    latest: int = 1
    upgrade: Upgrade | None = None

    @classmethod
    def of(cls, what: str, options: Mapping[str, Any]) -> Versions:
        """Read the options `version` and `min_version`. Raises TypeError or ValueError."""
        oldest, latest = options.get("min_version", 1), options.get("version", 1)
        for name, value in (("min_version", oldest), ("version", latest)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{what}: {name} must be an int, not {value!r}")
            if not 1 <= value <= MAX_VERSION:
                raise ValueError(f"{what}: {name} must be from 1 to {MAX_VERSION}, not {value}")
        if oldest > latest:
            raise ValueError(
                f"{what}: min_version, {oldest}, must not be above version, "
                f"{latest if 'version' in options else f'which is {latest} if it is left out'}"
            )
        return cls(oldest, latest)

    def understand(self, stored: str) -> bool:
        """Whether a job with these stored arguments may run here; if not, another worker must.

        A job with a malformed version may run: it then fails.
        """
        version = _version_of(stored)
        return version is None or self.oldest <= version <= self.latest

    def not_understood(self, stored: str) -> str:
        """Return why a job may not run here, for the log."""
        known = f"{self.oldest} to {self.latest}" if self.oldest < self.latest else self.latest
        return f"its arguments have version {_version_of(stored)}, known here is {known}"

    def upgraded(self, args: dict[str, Any]) -> dict[str, Any]:
        """Return decoded arguments in the latest version. Raises DecodeError."""
        version = 1
        if VERSION in args:
            args = dict(args)
            version = args.pop(VERSION)
        if not _is_version(version):
            raise DecodeError(
                f"{VERSION} of the arguments is {version!r}, but must be a number of a version",
                hint=f"Correct it by set_args, and retry the job: the latest is {self.latest}.",
            )
        if version > self.latest:
            raise DecodeError(
                f"the arguments have version {version!r}, and this code knows up to {self.latest}",
                hint="Retry the job on a worker with newer code.",
            )
        if version == self.latest or self.upgrade is None:
            return args
        upgraded = self.upgrade(args, version)
        if not isinstance(upgraded, Mapping):
            raise TypeError(f"the upgrade must return the arguments, not {upgraded!r}")
        return dict(upgraded)


def _version_of(stored: str) -> int | None:
    """Return the version of stored arguments; None if it is malformed."""
    if VERSION not in stored:
        return 1
    try:
        version = unwrap(stored).get(VERSION, 1)
    except DecodeError:
        return None
    return version if _is_version(version) else None


def _is_version(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_VERSION
