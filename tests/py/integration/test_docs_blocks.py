"""Every code block of the documentation is run by a test, or listed here with the reason."""

from __future__ import annotations

import re

import pytest

from support import ROOT

from .test_docs import blocks

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
}
BACKUP = "tests/py/compat/test_dump_restore.py does this, with its own folders"
EXTRAS = "tests/py/unit/test_extras.py imports each extra; installing needs the package index"
# The first lines of blocks that no test types in.
NOT_RUN = {
    ("README.md", "make demo"): f"{HERE}/test_release.py installs the wheel and runs the demo",
    ("docs/backup.md", "pg_dump -Fc"): BACKUP,
    ("docs/backup.md", "# postgresql.conf"): BACKUP,
    ("docs/backup.md", "cp -a /backup"): BACKUP,
    (
        "docs/backup.md",
        "postgresql://one,two",
    ): "tests/py/races/test_failover.py connects like this",
    ("docs/how-it-works.md", " producer "): "a drawing",
    ("docs/installing.md", "alter system"): "tests' servers start with such a setting",
    ("docs/installing.md", "create extension"): f"{HERE}/test_build.py installs each form",
    ("docs/installing.md", "psql -X"): f"{HERE}/test_docs_tutorials.py installs like this",
    ("docs/installing.md", "begin;"): f"{HERE}/test_build.py runs the block's DO",
    (
        "docs/operating.md",
        "$ pgdefer db health",
    ): f"a list of commands: {HERE}/test_docs_rest.py looks for them",
    ("docs/operating.md", "=> select cron"): "needs pg_cron",
    (
        "docs/operating.md",
        "pgdefer:",
    ): f"a file of postgres_exporter: {HERE}/test_docs_rest.py compares the columns",
    ("docs/page.md", "$ pgdefer web --dsn"): "tests/py/contrib/test_web_command.py starts it",
    (
        "docs/page.md",
        "$ pgdefer web --no-password",
    ): "tests/py/contrib/test_web_command.py starts it",
    ("docs/recurring.md", "=> select cron"): "needs pg_cron",
    ("docs/telemetry.md", "pip install"): EXTRAS,
    (
        "docs/tutorial.md",
        "$ export PGDEFER_HOME",
    ): f"the way without a server: {HERE}/test_docs_rest.py starts one",
    ("docs/upgrading.md", "-- @code"): "an example of a step: test_upgrade.py builds such a one",
    ("docs/worker-protocol.md", "register "): "a drawing",
}


def pages() -> list[str]:
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def test_every_block_is_run_or_has_a_reason() -> None:
    missing, used = [], set()
    for page in pages():
        if page in GENERATED:
            continue
        for block in blocks(page):
            reasons = [key for key in NOT_RUN if key[0] == page and block.text.startswith(key[1])]
            used.update(reasons)
            is_run = page in PAGES or page.rpartition("/")[0] in PAGES
            if not reasons and not (is_run and block.language in RUN):
                missing.append(f"{page}:{block.line} {block.text.splitlines()[0]}")
    assert not missing
    assert NOT_RUN.keys() == used


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
