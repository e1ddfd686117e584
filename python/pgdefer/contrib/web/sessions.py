"""The visitors who are logged in: kept in this process, under random names in their cookies.

Tests: contrib/test_web_faults.py.
"""

from __future__ import annotations

import dataclasses
import hmac
import secrets
import threading
import time

from .database import Database

__all__ = ["Session", "Sessions"]

IDLE = 30 * 60.0  # s
LONGEST = 8 * 3600.0  # s
MOST = 1_000
# Refused logins of all visitors in a minute, after which all wait: this stops password guessing.
REFUSED = 20


@dataclasses.dataclass
class Session:
    """A visitor, the role that it acts as, and the rights of that role."""

    name: str
    database: Database
    role: str
    functions: frozenset[str]
    views: frozenset[str]
    token: str = dataclasses.field(default_factory=secrets.token_urlsafe)
    since: float = dataclasses.field(default_factory=time.monotonic)
    seen: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def is_standby(self) -> bool:
        """Whether the server only reads; it may be promoted meanwhile."""
        return self.database.is_standby

    def may(self, function: str) -> bool:
        """Whether to offer a call. PostgreSQL decides whether it is allowed."""
        return function in self.functions and not self.is_standby

    def sees(self, view: str) -> bool:
        """Whether to offer a view, or a function that reads."""
        return view in self.views or view in self.functions

    def has_sent(self, token: str) -> bool:
        """Whether a form comes from a page of this session."""
        return hmac.compare_digest(self.token.encode(), token.encode())


class Sessions:
    """The sessions of all visitors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._refused: list[float] = []

    def get(self, name: str) -> Session | None:
        """Return a session that has not expired."""
        now = time.monotonic()
        with self._lock:
            over = [s for s in self._sessions.values() if is_over(s, now)]
            for session in over:
                del self._sessions[session.name]
            found = self._sessions.get(name)
            if found is not None:
                found.seen = now
        for session in over:
            session.database.close()
        return found

    def add(self, session: Session) -> None:
        """Add a session; if there are too many, remove the one that was used least recently."""
        with self._lock:
            if len(self._sessions) >= MOST:
                oldest = min(self._sessions.values(), key=lambda s: s.seen)
                del self._sessions[oldest.name]
                oldest.database.close()
            self._sessions[session.name] = session

    def drop(self, session: Session) -> None:
        """End a session."""
        with self._lock:
            self._sessions.pop(session.name, None)
        session.database.close()

    def close(self) -> None:
        """End all sessions."""
        with self._lock:
            self._sessions.clear()

    def may_try(self) -> bool:
        """Whether a login may be tried now."""
        with self._lock:
            last = time.monotonic() - 60
            self._refused = [at for at in self._refused if at > last]
            return len(self._refused) < REFUSED

    def note_refused(self) -> None:
        """Record a login that was refused."""
        with self._lock:
            self._refused.append(time.monotonic())


def is_over(session: Session, now: float) -> bool:
    """Whether a session has expired."""
    return now - session.seen > IDLE or now - session.since > LONGEST
