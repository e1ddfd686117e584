"""The linter of the documentation finds misspelt words and bad style, and leaves code alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT

pytestmark = pytest.mark.client

BAD = """# A page

A jobb waits in order to run.

It is is `in order to`, e.g. twice.
"""
GOOD = """# A page

The `jobb` waits [here](teh.md), a PgDeferError; see https://teh.example.

```text
In order to test teh linter, e.g. here.
```
"""


def test_the_linter_finds_what_is_wrong(tmp_path: Path) -> None:
    if shutil.which("aspell") is None:
        pytest.skip("there is no aspell here to check the spelling")
    (tmp_path / "bad.md").write_text(BAD, "utf-8")
    (tmp_path / "good.md").write_text(GOOD, "utf-8")
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "lint", tmp_path / "bad.md", tmp_path / "good.md"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    found = re.findall(r"(\w+)\.md:(\d+): ([\w.]+)", done.stdout)
    assert sorted(found) == [
        ("bad", "3", "pgdefer.plain"),
        ("bad", "3", "spelling"),
        ("bad", "5", "pgdefer.latin"),
        ("bad", "5", "pgdefer.twice"),
    ]


def test_the_word_list_is_in_order() -> None:
    words = (ROOT / "docs" / "words.txt").read_text("utf-8").split()
    assert words == sorted(set(words), key=str.lower)
