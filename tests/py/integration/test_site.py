"""The documentation as a site: it builds without a warning, and its search answers questions."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from support import ROOT

pytestmark = pytest.mark.client

SEARCH = Path(__file__).with_name("site_search.mjs")
# Questions in words that no heading has, each with the page of its answer.
IN_OTHER_WORDS = {
    "ignore duplicate deliveries": "unique.html",
    "exponential backoff": "reference.html",
    "cron schedule in a time zone": "recurring.html",
    "alembic migration": "alembic.html",
    "mock the queue in pytest": "testing.html",
    "grafana prometheus metrics": "telemetry.html",
    "QJ002": "errors.html",
    "moving from celery": "moving.html",
    "carry over waiting jobs from oban": "how-to/moving.html",
    "how do I make sure a customer's jobs run one at a time?": "how-to/jobs.html",
    "can I see why job 42 waits?": "how-to/debugging.html",
    "what does the job wait for": "how-to/debugging.html",
    "a fastapi endpoint that defers": "fastapi.html",
    "a tutorial in sql alone": "sql.html",
    "does exactly once exist": "why.html",
    "pgbouncer transaction mode": "installing.html",
    "how do I run a job every 5 minutes?": "how-to/workflows.html",
    "how do I run a job only once a day per user?": "unique.html",
    "fan out and fan in": "how-to/workflows.html",
    "how do I defer thousands of jobs at once?": "how-to/jobs.html",
    "how do I defer a job from a trigger?": "sql.html",
    "what happens if a job takes longer than its timeout?": "how-to/jobs.html",
    "how do I change the args of a failed job?": "operating.html",
    "how do I move a job to another queue?": "operating.html",
    "how do I delete old jobs?": "operating.html",
    "how do I run a worker in kubernetes?": "workers.html",
    "how many connections does a worker need?": "how-to/production.html",
    "how do I stop all jobs at once?": "how-to/production.html",
    "how do I set up alerts in grafana?": "how-to/production.html",
    "how do I mask personal data?": "how-to/production.html",
    "how do I get a notification when a job has failed?": "telemetry.html",
    "how do I limit a handler's memory?": "tutorial.html",
    "how do I pass dates or UUIDs as arguments?": "tutorial.html",
    "daylight saving time": "recurring.html",
    "why does my schedule not run?": "recurring.html",
    "how do I retry a single step?": "durable.html",
    "how do I roll back an upgrade?": "upgrading.html",
    "vacuum and bloat": "why.html",
    "can I run it on RDS?": "how-to/managed.html",
    "is there a dashboard?": "page.html",
    "does it run on Windows?": "installing.html",
    "what is the licence?": "repository/index.html",
}
HOSTILE = ["", " ", "?", "'s", "a the", '"one time"', "+job -lock", "title:", "*", "^~", "x" * 5000]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs-site` does: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def twenty_questions() -> list[tuple[str, str]]:
    text = (ROOT / "docs" / "README.md").read_text("utf-8").partition("## Twenty questions")[2]
    rows = re.findall(r"^\| (.*?\?) \| .*\]\(([^)]*)\)", text, re.MULTILINE)
    return [(question, link.replace(".md", ".html")) for question, link in rows]


@pytest.fixture(scope="module")
def found(site: Path) -> dict[str, list[list[str]]]:
    """Return for each question the first three pages, each with its sections."""
    if shutil.which("node") is None:
        pytest.skip("there is no node here to run the site's search")
    questions = [question for question, _ in twenty_questions()] + [*IN_OTHER_WORDS, *HOSTILE]
    done = subprocess.run(
        ["node", SEARCH, site],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    return {question: pages[:3] for question, pages in zip(questions, answers, strict=True)}


def test_the_search_answers_the_twenty_questions(found: dict[str, list[list[str]]]) -> None:
    """Each answer's page is among the first three, with the section that answers."""
    questions = twenty_questions()
    assert len(questions) == 20
    assert not [
        (question, found[question])
        for question, answer in questions
        if answer not in [section for page in found[question] for section in page]
    ]


def test_the_search_answers_other_words(found: dict[str, list[list[str]]]) -> None:
    assert not [
        (question, found[question])
        for question, answer in IN_OTHER_WORDS.items()
        if answer not in [section.partition("#")[0] for page in found[question] for section in page]
    ]


def test_the_search_bears_any_input(found: dict[str, list[list[str]]]) -> None:
    # Only common words, a phrase, and words that must occur or must not.
    assert all(found[text] for text in ("a the", '"one time"', "+job -lock"))


def test_llms_txt_lists_every_page(site: Path) -> None:
    text = (site / "llms.txt").read_text("utf-8")
    assert text.startswith("# pgdefer\n\n> ")
    assert (
        len(re.findall(r"^## (Tutorials|How-to|Explanation|Reference): ", text, re.MULTILINE)) == 4
    )
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", text, re.MULTILINE)
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    assert sorted(listed) == sorted(pages - {"README.md", "reference.head.md"})
    for name in listed:
        assert (site / name).read_bytes() == (docs / name).read_bytes()
        assert (site / name).with_suffix(".html").exists()


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    """They work where there is no network; light and dark follow the system, or the reader."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        text = page.read_text("utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]+)"', text)
        loaded += re.findall(r'<link[^>]* rel="(?:stylesheet|preconnect|icon)"[^>]*>', text)
        assert not [each for each in loaded if "//" in each], page
        assert 'data-md-color-scheme="slate"' in text


@pytest.fixture
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("html", "warns"),
    [
        ("<p>text\n- item</p>", True),
        ("<p>text\n1. item</p>", True),
        ("<p>text\n| a | b |</p>", True),
        ("<p>text\n<code>- item</code></p>", False),
        ("<p>one - two</p><pre>- item</pre>", False),
    ],
)
def test_markdown_that_the_site_would_show_is_a_warning(
    hooks: ModuleType, caplog: pytest.LogCaptureFixture, html: str, warns: bool
) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))
    with caplog.at_level(logging.WARNING):
        assert hooks.on_page_content(html, page, None, None) == html
    assert bool(caplog.records) == warns
