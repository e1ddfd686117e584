"""Write the synchronous twins: each `x.py` from the `x_async.py` beside it.

    async_to_sync.py           write them
    async_to_sync.py --check   exit with 1 if one is not current

The rules work on text: they remove `async` and `await`, the `Async`, `async_` or `_async` of names,
and what follows `# Not in the twin:` until `...`. If the rules do not fit a source, it is not a
twin: write both versions by hand.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

__all__ = ["main", "sources", "twin_of", "written"]

PACKAGE = Path(__file__).parent / "pgdefer"
HEADER = "# Generated from {source}: change that, and run `make generate`.\n"
RULES = [
    (r"^    # Not in the twin:\n(?s:.*?) \.\.\.\n", ""),
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\basyncio\.sleep\b", "time.sleep"),
    (r"^import asyncio$", "import time"),
    (r"\bAsyncPool\b", "SyncPool"),
    (r"\benter_async_context\b", "enter_context"),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r"\b__a(enter|exit)__\b", r"__\1__"),
    (r"  # noqa: ASYNC109", ""),
    (r" in asyncio\b", ""),
    (r"\b(Any)?Async(?=[A-Z])", lambda found: found[1] or ""),
    (r"\basync_(?=\w)", ""),
    (r"(?<=\w)_async\b", ""),
]


def sources() -> list[Path]:
    """Return the asynchronous sources."""
    return sorted(PACKAGE.rglob("*_async.py"))


def twin_of(source: Path) -> Path:
    """Return the path of a source's twin."""
    return source.with_name(source.name.replace("_async.py", ".py"))


def written(source: Path) -> str:
    """Return the text of a source's twin."""
    text = source.read_text("utf-8")
    for pattern, replacement in RULES:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    text = HEADER.format(source=source.name) + text
    ruff = [sys.executable, "-m", "ruff"]
    name = ["--stdin-filename", str(twin_of(source)), "-"]
    for command in (["check", "--quiet", "--fix-only", "--select", "I"], ["format", "--quiet"]):
        done = subprocess.run(
            [*ruff, *command, *name], input=text, capture_output=True, text=True, check=True
        )
        text = done.stdout
    return text


def main() -> None:
    """Write the twins, or check them."""
    stale = [path for path in sources() if not _is_current(path)]
    for source in stale:
        if "--check" not in sys.argv[1:]:
            twin_of(source).write_text(written(source), "utf-8")
        print(twin_of(source).relative_to(PACKAGE))
    sys.exit(1 if stale and "--check" in sys.argv[1:] else 0)


def _is_current(source: Path) -> bool:
    twin = twin_of(source)
    return twin.exists() and twin.read_text("utf-8") == written(source)


if __name__ == "__main__":
    main()
