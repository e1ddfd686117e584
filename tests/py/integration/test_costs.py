"""The hot path costs what bench/costs.json says, within 2 %.

WAL bytes are the same on every machine. Instructions hardly differ, but take a minute under
valgrind, so they are checked in the long tests. `bench/bench_instructions.py --write` keeps new
figures where a change is worth its price.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from support import ROOT

pytestmark = pytest.mark.long


def check(*options: str) -> None:
    """Run the bench with the embedded server, whose figures are kept."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "bench_instructions.py"), "--check", *options],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PGDEFER_PG_BIN"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.client
def test_jobs_write_as_many_bytes_of_wal_as_before() -> None:
    check("--wal")


@pytest.mark.client
@pytest.mark.soak
def test_jobs_take_as_many_instructions_as_before() -> None:
    if shutil.which("valgrind") is None:
        pytest.skip("there is no valgrind (apt install valgrind)")
    check()
