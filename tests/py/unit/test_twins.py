"""The synchronous twins are current."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_twins_are_current() -> None:
    command = [sys.executable, str(ROOT / "python" / "async_to_sync.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run `make generate`: {done.stdout}{done.stderr}"
