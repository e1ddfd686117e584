"""What the site does in another way than a code host, for MkDocs.

The navigation is the list of docs/README.md. Headings have the anchors that code hosts give them.
Files that the pages link to outside of docs/ are published too, below repository/. A page that
Markdown on a code host shows in another way than the site is a warning, and warnings are errors.
"""

from __future__ import annotations

import logging
import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OUTSIDE = "repository"  # where the site has files from outside of docs/
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s#]+)(#[^()\s]*)?\)")
FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
# What the site shows as text: a list, a table or a fence without an empty line above it.
UNRENDERED = re.compile(r"^\s*(?:[-*] |\d+\. |\||```)", re.MULTILINE)
# How the search ranks pages, by their names or folders.
RANK = {
    "how-to": {"boost": 2},
    "adr": {"boost": 0.2},
    "python-reference.md": {"boost": 0.2},
    "command-line.md": {"boost": 0.2},
}

log = logging.getLogger("mkdocs.hooks.pgdefer")


def index() -> list[tuple[str, str, list[tuple[str, str, str]]]]:
    """Return the parts of docs/README.md: title, description, and its pages.

    Of each page the title, the path, and what the list says about it.
    """
    found = []
    text = (DOCS / "README.md").read_text("utf-8")
    for head, body in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        title, colon, about = head.partition(": ")
        if colon:
            joined = re.sub(r"\n +", " ", body)
            pages = re.findall(r"\[([^\]]+)\]\(([^)#]+\.md)\)(?:: ([^\n]*))?", joined)
            found.append((title, about, pages))
    return found


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation and the form of anchors."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    nav: list[Any] = ["README.md", {"The project": f"{OUTSIDE}/README.md"}]
    for title, _, pages in index():
        plain = [{name: path} for name, path, _ in pages if not path.startswith("adr/")]
        decisions = [
            {name.capitalize(): path} for name, path, _ in pages if path.startswith("adr/")
        ]
        nav.append({title: [*plain, *([{"Decisions": decisions}] if decisions else [])]})
    config.nav = nav
    return config


def linked(path: Path) -> set[Path]:
    """Return the files that a page links to."""
    text = FENCE.sub("", path.read_text("utf-8"))
    targets = {(path.parent / name).resolve() for _, name, _ in LINK.findall(text)}
    return {target for target in targets if target.is_file() and target.is_relative_to(ROOT)}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link to outside of docs/, and what that links to."""
    todo = {Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path}
    seen = {ROOT / "README.md"}
    todo |= seen
    while todo:
        found = {target for path in todo if path.suffix == ".md" for target in linked(path)}
        todo = {target for target in found - seen if not target.is_relative_to(DOCS)}
        seen |= todo
    for path in sorted(seen):
        name = f"{OUTSIDE}/{path.relative_to(ROOT).as_posix()}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def source(page: Page) -> Path:
    """Return the file of a page in the repository."""
    name = page.file.src_uri
    return ROOT / name.removeprefix(f"{OUTSIDE}/") if name.startswith(OUTSIDE) else DOCS / name


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where the site has their files. A folder is no page: its link becomes text."""
    here = source(page).parent

    def moved(found: re.Match[str]) -> str:
        text, name, anchor = found[1], found[2], found[3] or ""
        target = (here / name).resolve()
        if re.match(r"[a-z]+:", name) or not target.is_relative_to(ROOT) or not target.exists():
            return found[0]
        if target.is_dir():
            return text
        inside = target.is_relative_to(DOCS)
        name = target.relative_to(DOCS if inside else ROOT).as_posix()
        name = name if inside else f"{OUTSIDE}/{name}"
        relative = posixpath.relpath(name, posixpath.dirname(page.file.src_uri) or ".")
        return f"[{text}]({relative}{anchor})"

    name = page.file.src_uri
    page.meta["search"] = RANK.get(name, RANK.get(name.rpartition("/")[0], {}))
    # The index only lists what the pages say: it would stand before them.
    if name == "README.md":
        page.meta["search"] = {"exclude": True}
    parts = re.split(r"(^ *```.*?^ *```$|`[^`\n]+`)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if n % 2 else LINK.sub(moved, part) for n, part in enumerate(parts))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Warn of Markdown that was not rendered, as only code hosts accept it."""
    for paragraph in re.findall(r"<p>(.*?)</p>", html, re.DOTALL):
        if UNRENDERED.search(re.sub(r"<(code)>.*?</code>|<[^>]*>", r"\1", paragraph)):
            name, text = page.file.src_uri, paragraph[:80]
            log.warning("Doc file '%s' has Markdown that shows as text: %s", name, text)
    return html


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Name the first page."""
    nav.homepage.title = "Documentation"  # type: ignore[union-attr]
    return nav


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt, and the Markdown of each page beside it; let the search answer questions."""
    site = Path(config.site_dir)
    (worker,) = site.glob("assets/javascripts/workers/search.*.js")
    questions = (Path(__file__).parent / "questions.js").read_text("utf-8")
    worker.write_text(questions + worker.read_text("utf-8"), "utf-8")
    lines = [f"# {config.site_name}", "", f"> {config.site_description}.", ""]
    for title, text, pages in index():
        lines += [f"## {title}: {text}", ""]
        for name, path, about in pages:
            target = site / path
            shutil.copyfile(DOCS / path, target)
            lines.append(f"- [{name}]({path})" + (f": {about}" if about else ""))
        lines.append("")
    (site / "llms.txt").write_text("\n".join(lines), "utf-8")
