"""The page on testing: its files are written, and its tests pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pgdefer.database.embedded import EmbeddedServer
from support import ROOT

from .test_docs import Reader, blocks, follow, reader

__all__ = ["reader"]

pytestmark = pytest.mark.client


@pytest.mark.long
def test_the_page_on_testing(server: EmbeddedServer, tmp_path: Path) -> None:
    environment = {**os.environ, "PGDEFER_TEST_SERVER": server.dsn("postgres")}
    environment |= {"PYTHONPATH": str(ROOT / "python"), "PYTEST_ADDOPTS": "-p no:cacheprovider"}
    outputs = []
    for block in blocks("docs/testing.md"):
        first, _, rest = block.text.partition("\n")
        if block.language == "sh":
            command = block.text.replace("pytest", "python -m pytest", 1)
            done = subprocess.run(
                [sys.executable, *command.split()[1:]],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=900,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            outputs.append(done.stdout + done.stderr)
        else:
            found = re.fullmatch(r"# ([\w.]+)", first)
            assert found is not None, first
            (tmp_path / found[1]).write_text(rest)
    assert "7 passed" in outputs[0]
    assert "8 passed" in outputs[1]
    assert "OK" in outputs[2]


def test_the_page_on_telemetry(reader: Reader) -> None:
    reader.install()
    follow(reader.type_in, "docs/telemetry.md")
