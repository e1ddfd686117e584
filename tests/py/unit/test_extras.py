"""Packages beside the core are imported only when needed."""

from __future__ import annotations

import subprocess
import sys


def test_the_core_needs_no_extras() -> None:
    code = (
        "import sys, pgdefer, pgdefer.cli\n"
        "extras = ('pgdefer.testing', 'pgdefer.contrib', 'pytest', 'opentelemetry', 'sentry_sdk',"
        " 'prometheus_client', 'psycopg_pool')\n"
        "print([name for name in extras if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
