"""Every code block of the documentation is run by a test, or listed here with the reason."""

from __future__ import annotations

import re

import pytest

from support import ROOT

from .test_docs import Block, blocks

pytestmark = pytest.mark.client

# What the tests type in or compare; of other languages they run nothing.
RUN = {"sh", "sql", "python", "ini", "text"}
# Pages whose blocks say what the catalog, the docstrings or the help say.
GENERATED = {"docs/reference.md", "docs/python-reference.md", "docs/command-line.md"}
HERE = "tests/py/integration"
PAGES = {
    "README.md": f"{HERE}/test_docs.py",
    "docs/alembic.md": f"{HERE}/test_docs.py",
    "docs/django.md": "tests/py/contrib/test_django_docs.py",
    "docs/durable.md": f"{HERE}/test_docs.py",
    "docs/fastapi.md": f"{HERE}/test_docs_tutorials.py",
    "docs/how-to": f"{HERE}/test_docs_how_to.py",
    "docs/installing.md": f"{HERE}/test_docs_rest.py",
    "docs/limits.md": f"{HERE}/test_docs_operating.py",
    "docs/many-databases.md": f"{HERE}/test_docs.py",
    "docs/operating.md": f"{HERE}/test_docs_operating.py",
    "docs/page.md": f"{HERE}/test_docs_rest.py",
    "docs/python.md": f"{HERE}/test_docs.py",
    "docs/recurring.md": f"{HERE}/test_docs_rest.py",
    "docs/scaling.md": f"{HERE}/test_docs.py",
    "docs/security.md": f"{HERE}/test_docs_rest.py",
    "docs/sql.md": f"{HERE}/test_docs_tutorials.py",
    "docs/sqlalchemy.md": f"{HERE}/test_docs.py",
    "docs/telemetry.md": f"{HERE}/test_docs_testing.py",
    "docs/testing.md": f"{HERE}/test_docs_testing.py",
    "docs/tutorial.md": f"{HERE}/test_docs.py",
    "docs/unique.md": f"{HERE}/test_docs_unique.py",
    "docs/upgrading.md": f"{HERE}/test_docs_rest.py",
    "docs/workers.md": f"{HERE}/test_docs_operating.py",
}
BACKUP = "tests/py/compat/test_dump_restore.py does this, with its own folders"
LOST = "tests/py/races/test_failover_lost.py runs it"
WEB = "tests/py/contrib/test_web_command.py starts it"
# The beginnings of blocks that no test types in, by page.
NOT_RUN = {
    "README.md": {
        "make demo": f"{HERE}/test_release.py installs the wheel and runs the demo",
    },
    "docs/backup.md": {
        "pg_dump -Fc": BACKUP,
        "# postgresql.conf": BACKUP,
        "cp -a /backup": BACKUP,
    },
    "docs/how-it-works.md": {" producer ": "a drawing"},
    "docs/how-to/failover.md": {
        'psql -c "select pg_last_wal': LOST,
        'psql -c "select setval': LOST,
        "DATA=/srv/old-primary": LOST,
        "$ pgdefer job why": "tests/py/compat/test_standby.py reads from one",
    },
    "docs/installing.md": {
        "alter system": "the tests' servers start with such a setting",
        "create extension": f"{HERE}/test_build.py installs both forms",
        "psql -X": f"{HERE}/test_docs_tutorials.py installs in this way",
        "begin;": f"{HERE}/test_build.py runs its DO",
    },
    "docs/operating.md": {
        "$ pgdefer db health": f"{HERE}/test_docs_rest.py looks for each command",
        "=> select cron": "it needs pg_cron",
        "pgdefer:": f"{HERE}/test_docs_rest.py compares the columns",
    },
    "docs/page.md": {
        "$ pgdefer web --dsn ": WEB,
        "$ pgdefer web --no-password": WEB,
        "$ pgdefer web --dsns": "tests/py/contrib/test_web_many.py starts it",
    },
    "docs/recurring.md": {"=> select cron": "it needs pg_cron"},
    "docs/tutorial.md": {"$ export PGDEFER_HOME": f"{HERE}/test_docs_rest.py starts a server"},
    "docs/upgrading.md": {"-- @code": "a sample: tests/py/compat/test_upgrade.py has such steps"},
    "docs/worker-protocol.md": {
        "register ": "a drawing",
        "register_worker(": f"{HERE}/test_docs_rest.py compares it with the catalog",
    },
}


def pages() -> list[str]:
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def reason(page: str, block: Block) -> str | None:
    """Return the beginning under which a block is listed as not run."""
    starts = NOT_RUN.get(page, {})
    return next((start for start in starts if block.text.startswith(start)), None)


def test_every_block_is_run_or_has_a_reason() -> None:
    missing, used = [], set()
    for page in set(pages()) - GENERATED:
        is_typed = page in PAGES or page.rpartition("/")[0] in PAGES
        for block in blocks(page):
            if start := reason(page, block):
                used.add((page, start))
            elif not is_typed or block.language not in RUN:
                missing.append(f"{page}:{block.line}")
    assert not missing
    assert used == {(page, start) for page, starts in NOT_RUN.items() for start in starts}


@pytest.mark.parametrize("page", PAGES)
def test_the_test_names_its_page(page: str) -> None:
    path = ROOT / PAGES[page]
    name = page.removeprefix("docs/")
    assert re.search(rf'"(?:docs/)?{re.escape(name)}"', path.read_text("utf-8")), path


def test_no_block_is_indented() -> None:
    """The tests see only blocks that begin with the line; in a list they would not be run."""
    for page in set(pages()) - GENERATED:
        text = (ROOT / page).read_text("utf-8")
        assert text.count("```") == 2 * len(blocks(page)), page
