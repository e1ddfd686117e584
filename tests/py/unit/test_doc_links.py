"""The documentation's links lead somewhere, its index lists every page, its figures agree."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from support import ROOT

DOCS = ROOT / "docs"
# reference.head.md is the beginning of reference.md.
PAGES = sorted(set(DOCS.rglob("*.md")) - {DOCS / "reference.head.md"})
OTHERS = [
    ROOT / "examples" / "django_shop" / "README.md",
    ROOT / "tests" / "protocol" / "README.md",
]
LINK = re.compile(r"\]\(([^()\s]*)\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)


def prose(path: Path) -> str:
    """Return a page without code, in which brackets are no links."""
    text = re.sub(r"^ *```.*?^ *```$", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "code", text)


@cache
def anchors(path: Path) -> set[str]:
    """Return the names that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def links(path: Path) -> list[str]:
    found = [inline or defined for inline, defined in LINK.findall(prose(path))]
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize(
    "path",
    [*sorted(ROOT.glob("*.md")), *PAGES, *OTHERS],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for link in links(path):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken
    used = set(re.findall(r"\]\[([^\]]+)\]", prose(path)))
    assert used == set(re.findall(r"^\[([^\]]+)\]:", prose(path), re.MULTILINE))


def test_links_are_seen() -> None:
    assert sum(len(links(path)) for path in PAGES) > 150
    assert {"the-embedded-server", "roles"} <= anchors(DOCS / "installing.md")


def test_the_index_lists_every_page_once() -> None:
    text, _, questions = (DOCS / "README.md").read_text("utf-8").partition("## Twenty questions")
    listed = Counter(name for name in re.findall(r"\]\(([^)#]+)\)", text) if name[0] != ".")
    pages = {path.relative_to(DOCS).as_posix() for path in PAGES} - {"README.md"}
    assert listed == dict.fromkeys(pages, 1)
    assert len(re.findall(r"^\|.*\]\(", questions, re.MULTILINE)) == 20


def test_the_figures_are_those_of_the_benchmarks() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    section = re.findall(r"^## Figures\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)[0]
    benchmarks = (DOCS / "benchmarks.md").read_text("utf-8")
    figures = re.findall(r"\b\d+\.\d+(?:k/s| ms)?", section)
    figures += re.findall(r"bench_\w+\.py --runs \d+", section)
    assert len(figures) == 13
    assert not [figure for figure in figures if figure.removesuffix("/s") not in benchmarks]


@pytest.mark.parametrize(("page", "at_least"), [("why.md", 4), ("scaling.md", 5)])
def test_figures_that_name_the_benchmarks_are_theirs(page: str, at_least: int) -> None:
    text = (DOCS / page).read_text("utf-8")
    if page == "scaling.md":  # the rest of that page computes with these
        text = re.findall(r"^## What one server .*?^## ", text, re.MULTILINE | re.DOTALL)[0]
    else:
        text = "\n\n".join(part for part in text.split("\n\n") if "](benchmarks.md" in part)
    benchmarks = (DOCS / "benchmarks.md").read_text("utf-8")
    figures = re.findall(r"\b\d+\.\dk(?=/s)|\b0\.\d\d\b|\b\d\.\d ms|\d,\d{3} bytes", text)
    assert len(figures) >= at_least
    assert not [figure for figure in figures if figure.removesuffix(" bytes") not in benchmarks]


def test_every_cell_of_the_comparison_has_its_source() -> None:
    """Ours a test or a page, theirs a page of theirs; or it says that we found no answer."""
    text = (ROOT / "README.md").read_text("utf-8")
    section = re.findall(r"^## How it compares\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)[0]
    assert re.search(r"\bAs of [A-Z][a-z]+ 20\d\d\b", section)
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    assert len(rows) >= 10
    keys = {"graphile-worker": "graphile", "pg-boss": "boss"}
    for row in rows:
        assert re.fullmatch(r"\[[^\]]+\]\((?:docs|tests)/[^)]+\)", row[1]), row
        for system, cell in zip(head[2:], row[2:], strict=True):
            key = keys.get(system, system.lower())
            assert cell == "?" or re.fullmatch(rf"\[[^\]]+\]\[{key} \d+\]", cell), cell
