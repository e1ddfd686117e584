"""The form that an installation takes, and the plain file within a caller's transaction."""

from __future__ import annotations

import pytest

from pgdefer import PgDeferError, __version__
from pgdefer.database.embedded import sql_folder
from pgdefer.database.install import Form, Found, choose, is_at_least, offered_version, plain_script

NOTHING = Found(is_available=False, is_created=False, has_code=False)
FILES = Found(is_available=True, is_created=False, has_code=False)
EXTENSION = Found(is_available=True, is_created=True, has_code=True)
PLAIN = Found(is_available=False, is_created=False, has_code=True)
PLAIN_AND_FILES = Found(is_available=True, is_created=False, has_code=True)
FILES_GONE = Found(is_available=False, is_created=True, has_code=True)


@pytest.mark.parametrize(
    ("found", "auto", "plain", "extension"),
    [
        (NOTHING, "plain", "plain", "no files"),
        (FILES, "extension", "plain", "extension"),
        (EXTENSION, "extension", "as an extension here", "extension"),
        (PLAIN, "plain", "plain", "by plain SQL here"),
        (PLAIN_AND_FILES, "plain", "plain", "by plain SQL here"),
        (FILES_GONE, "no files", "as an extension here", "no files"),
    ],
)
def test_the_form(found: Found, auto: str, plain: str, extension: str) -> None:
    asked: dict[Form, str] = {"auto": auto, "plain": plain, "extension": extension}
    for form, expected in asked.items():
        if expected in {"plain", "extension"}:
            assert choose(found, form) == expected
        else:
            with pytest.raises(PgDeferError, match=expected) as caught:
                choose(found, form)
            assert caught.value.hint


def test_the_plain_script() -> None:
    script = plain_script()
    lines = script.splitlines()
    whole = (sql_folder() / "pgdefer.sql").read_text("utf-8").splitlines()
    # Only the ends of the file's own transaction are missing.
    assert [line for line in whole if line and line not in {"begin;", "commit;"}] == [
        line for line in lines if line
    ]
    assert "select queue.install();" in lines[-3:]


def test_versions() -> None:
    assert is_at_least(offered_version(), __version__)
    assert is_at_least("0.1.0", "0.1.0")
    assert is_at_least("0.10.0", "0.9.1")
    assert is_at_least("1.0", "0.9.1")
    assert not is_at_least("0.9.1", "0.10.0")
    with pytest.raises(ValueError, match="invalid literal"):
        is_at_least("0.1.0", "next")
