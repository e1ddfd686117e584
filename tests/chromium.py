"""A real browser for tests: Debian's chromium, driven by playwright."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

PATIENCE = 120_000  # ms
expect.set_options(timeout=PATIENCE)


def find_chromium() -> str | None:
    """Return a chromium that starts: Ubuntu's package is a stub that asks for another installer."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        path = shutil.which(name)
        if (
            path
            and not subprocess.run([path, "--version"], capture_output=True, check=False).returncode
        ):
            return path
    return None


@contextlib.contextmanager
def open_chromium() -> Iterator[Browser]:
    """Give a browser; skip the test if there is none."""
    path = find_chromium()
    if path is None:  # also where skips are forbidden: it has 300 MB
        pytest.skip("SKIPPED: there is no chromium here: tests/install-tools browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, timeout=PATIENCE)
        yield browser
        browser.close()
