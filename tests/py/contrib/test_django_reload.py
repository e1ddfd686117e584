"""With DEBUG a worker restarts when a file of the project has changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pgdefer.contrib.django.application import DjangoApp
from pgdefer.contrib.django.models import Worker

from .conftest import PROJECT, environment_of

pytestmark = [pytest.mark.client, pytest.mark.long]

NEW = """

@app.task
def added_later() -> str:
    return "new code"
"""


def test_changed_code_is_run(app: DjangoApp, shop: str, tmp_path: Path) -> None:
    project = Path(shutil.copytree(PROJECT, tmp_path / "project"))
    tasks, log = project / "shop" / "tasks.py", tmp_path / "log"
    command = [sys.executable, str(project / "manage.py"), "pgdefer", "worker"]
    with log.open("w") as output:
        worker = subprocess.Popen(
            command, env=environment_of(shop) | {"DEBUG": "1"}, stdout=output, stderr=output
        )
    try:
        end = time.monotonic() + 120
        while not Worker.objects.exists():
            assert time.monotonic() < end, log.read_text()
            assert worker.poll() is None, log.read_text()
        tasks.write_text(tasks.read_text() + NEW)
        # Again and again, as the first change may come before the reloader has looked.
        while "has changed" not in log.read_text():
            assert time.monotonic() < end, log.read_text()
            then = tasks.stat().st_mtime + 1
            os.utime(tasks, (then, then))
            time.sleep(0.2)
        assert app.defer("shop.tasks.added_later").result(120) == "new code"
    finally:
        worker.terminate()
        worker.wait(120)
    assert "Traceback" not in log.read_text()
