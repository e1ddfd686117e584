"""Django's own tests of tasks, with this backend in the places of Django's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import django
import pytest

from pgdefer.database.embedded import EmbeddedServer
from support import ROOT

from .conftest import PROJECT

pytest.importorskip("django.tasks", reason="the backend of TASKS needs Django 6, so Python 3.12")
pytestmark = [pytest.mark.client, pytest.mark.long]

RUN = """
import sys
from django.conf import settings
settings.PGDEFER = {}
import django
django.setup()
from django.test.utils import get_runner
get_runner(settings)(verbosity=2).run_tests(sys.argv[1:])
"""
# The backends of Django under test there, and what is put in their places.
BACKENDS = {
    "django.tasks.backends.dummy": ("DummyBackend", "Listing"),
    "django.tasks.backends.immediate": ("ImmediateBackend", "Running"),
}
# The values that the queue stores need not be JSON: Django's tests want a TypeError.
NOT_ONLY_JSON = {"test_enqueue_with_invalid_argument", "test_aenqueue_with_invalid_argument"}
# They change the list in which DummyBackend keeps its results.
CHANGES_THE_LIST = {"test_refresh_result", "test_refresh_result_async"}
# They want what a backend without results and times refuses, and what happens in the caller.
ONLY_IMMEDIATE = {
    "test_cannot_get_result",
    "test_cannot_refresh_result",
    "test_cannot_pass_run_after",
    "test_throws_keyboard_interrupt",
    "test_doesnt_wait_until_transaction_commit_by_default",
}
# The effects of a job remain, though its result can't be stored: it has succeeded.
UNSTORABLE_RESULT = {"test_complex_return_value"}
# Of each page of tests: the backend replaced, how many there are, and which fail.
PAGES = {
    "test_tasks": ("django.tasks.backends.dummy", 39, NOT_ONLY_JSON),
    "test_dummy_backend": ("django.tasks.backends.dummy", 17, CHANGES_THE_LIST),
    "test_immediate_backend": (
        "django.tasks.backends.immediate",
        20,
        ONLY_IMMEDIATE | UNSTORABLE_RESULT,
    ),
}


def sdist(requirement: str, folder: Path, variable: str) -> Path:
    """Unpack a project's sdist, which has the tests that its wheel lacks; return its folder."""
    found = Path(os.environ.get(variable, folder / "none"))
    if not found.exists():
        pip = f"{sys.executable} -m pip download --quiet --no-deps --no-binary :all: -d".split()
        if subprocess.run([*pip, folder, requirement], check=False).returncode:
            pytest.skip(f"the sdist of {requirement} can't be had: name one by {variable}")
        (found,) = folder.glob("*.tar.gz")
    with tarfile.open(found) as packed:
        members = [m for m in packed.getmembers() if re.search(r"/tests/(tasks/)?[^/]+$", m.name)]
        packed.extractall(folder, members, filter="data")
    (tests,) = folder.glob("*/tests")
    return tests.parent


@pytest.mark.parametrize("page", PAGES)
def test_djangos_own(server: EmbeddedServer, tmp_path: Path, page: str) -> None:
    replaced, count, otherwise = PAGES[page]
    theirs, ours = BACKENDS[replaced]
    tests = sdist(f"Django=={django.get_version()}", tmp_path, "PGDEFER_DJANGO_SDIST") / "tests"
    file = tests / "tasks" / f"{page}.py"
    text = file.read_text("utf-8")
    for old, new in (
        (f"{replaced}.{theirs}", f"own_backends.{ours}"),
        (f"from {replaced} import {theirs}", f"from own_backends import {ours} as {theirs}"),
        ("SimpleTestCase", "TransactionTestCase"),
    ):
        text = text.replace(old, new)
    file.write_text(text)
    folders = (ROOT / "python", Path(__file__).parent, PROJECT, tests)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "PGHOST": str(server.socket_folder),
        "PGUSER": "postgres",
        "PGDATABASE": f"own_{page}",
        # Some coroutines there call what only backends without a database allow them.
        "DJANGO_ALLOW_ASYNC_UNSAFE": "1",
    }
    command = [sys.executable, "-c", RUN, f"tasks.{page}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    ran = re.search(r"^Ran (\d+) tests", done.stderr, re.MULTILINE)
    assert ran is not None, done.stderr
    assert int(ran[1]) >= count
    failed = set(re.findall(r"^(?:ERROR|FAIL): (\w+) ", done.stderr, re.MULTILINE))
    assert failed == otherwise, done.stderr
