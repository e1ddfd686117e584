"""Packages beside the core are imported only when needed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

from support import ROOT

FOR_DEVELOPERS = {"all", "docs", "lint", "test"}


def test_all_has_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    (listed,) = extras["all"]
    found = re.fullmatch(r"pgdefer\[(.*)\]", listed)
    assert found is not None
    assert set(found[1].split(",")) == set(extras) - FOR_DEVELOPERS


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
