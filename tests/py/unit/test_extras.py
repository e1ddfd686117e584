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


def test_no_worker_is_imported_before_one_is_used() -> None:
    code = (
        "import sys, pgdefer, pgdefer.testing\n"
        "workers = ('pgdefer.worker.worker', 'http.server', 'multiprocessing', 'unittest')\n"
        "print([name for name in workers if name in sys.modules])\n"
        "print(pgdefer.Worker.__name__, pgdefer.testing.QueueTestCase.__name__)\n"
        "print({*pgdefer.__all__} - {*dir(pgdefer)})\n"
        "print([hasattr(module, 'nothing') for module in (pgdefer, pgdefer.testing)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == ["[]", "Worker QueueTestCase", "set()", "[False, False]"]
