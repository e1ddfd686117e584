"""Errors: their meaning, and their texts."""

from __future__ import annotations

import psycopg
import pytest

from pgdefer import InvalidParameter
from pgdefer.errors import is_refused

AT = 'connection failed: connection to server at "::1", port 5432 failed: '


def test_the_hint_is_a_sentence_of_its_own() -> None:
    assert str(InvalidParameter("no", detail="id: 9", hint="Do.")) == "no (id: 9). Do."
    assert str(InvalidParameter("It is no.", hint="Do.")) == "It is no. Do."
    assert str(InvalidParameter("no", detail="id: 9")) == "no (id: 9)"
    assert str(InvalidParameter("no")) == "no"


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ('FATAL:  database "shop" does not exist', True),
        ('FATAL:  role "ann" does not exist', True),
        ('FATAL:  password authentication failed for user "ann"', True),
        ('FATAL:  Peer authentication failed for user "ann"', True),
        ('FATAL:  no pg_hba.conf entry for host "::1", user "ann", database "shop"', True),
        ("FATAL:  no such database: shop", True),
        ("fe_sendauth: no password supplied", True),
        ("Connection refused", False),
        ("FATAL:  the database system is starting up", False),
        ("FATAL:  sorry, too many clients already", False),
        ("FATAL:  terminating connection due to administrator command", False),
    ],
)
def test_who_is_refused(text: str, refused: bool) -> None:
    assert is_refused(psycopg.OperationalError(AT + text)) == refused
