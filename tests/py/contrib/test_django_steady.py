"""Moving in the waiting tasks of Steady Queue, installed from PyPI, with its workers beside."""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

pytest.importorskip("django.tasks")

from django.contrib.auth.models import User
from django.core.management import call_command

from pgdefer.contrib.django.application import DjangoApp
from pgdefer.contrib.django.models import Job
from support import ROOT
from workers import wait_for

pytestmark = pytest.mark.client

REQUIREMENTS = ["steady-queue==0.3.0", "crontab==1.0.5"]
SETTINGS = """
import os

SECRET_KEY = "x"
USE_TZ = True
DATABASES = {"default": {
    "ENGINE": "django.db.backends.postgresql",
    "NAME": os.environ["PGDATABASE"], "HOST": os.environ["PGHOST"], "USER": os.environ["PGUSER"],
}}
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "steady_queue"]
TASKS = {"default": {"BACKEND": "steady_queue.backend.SteadyQueueBackend", "QUEUES": []}}
"""
# The same tasks, in the project of either queue.
CHORES = """
import json
from django.db import connection
from django.tasks import task

try:
    from steady_queue.concurrency import limits_concurrency
except ImportError:

    def limits_concurrency(**_):
        return lambda task: task


def write(n, text):
    with connection.cursor() as cursor:
        cursor.execute("insert into ledger values (%s, %s)", [n, text])


@task
def note(n, *rest, **more):
    write(n, repr((rest, sorted(more.items()))))


@limits_concurrency(key="pair", to=2)
@task
def pair(n):
    write(n, "pair")


@limits_concurrency(key="one")
@task
def one(n):
    write(n, "one")
"""
ENQUEUE = """
import datetime as dt
import django

django.setup()
from chores import note, one, pair
from django.contrib.auth.models import User
from django.utils import timezone
from steady_queue.models import Job as JobRow

ann, gone = User.objects.order_by("id")
at = dt.datetime(2026, 1, 2, 3, tzinfo=dt.UTC)
# Its `enqueue` also makes a TaskResult, which Django 6.1 refuses with such arguments.
values = [1, at, at.date(), dt.time(4), dt.timedelta(hours=5), [1, {"a": None}]]
JobRow.objects.enqueue(note, values, {"who": ann})
second = note.using(queue_name="mail").enqueue(2)
JobRow.objects.filter(id=second.id).update(priority=7)  # its backend refuses `using(priority=7)`
note.using(run_after=timezone.now() + dt.timedelta(days=1)).enqueue(3)
JobRow.objects.enqueue(note, [4, gone], {})
for n in (5, 6, 7):
    pair.enqueue(n)
for n in (8, 9):
    one.enqueue(n)
gone.delete()
"""
MANY = """
import django

django.setup()
from chores import note, one

for n in range(300):
    (one if n % 3 == 0 else note).enqueue(n)
"""


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Steady Queue, for the path of its own processes."""
    folder = tmp_path_factory.mktemp("steady")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    if subprocess.run([*pip, *REQUIREMENTS], check=False).returncode:
        pytest.skip("Steady Queue can't be installed here")
    (folder / "their_settings.py").write_text(SETTINGS)
    return folder


@pytest.fixture
def theirs(
    steady: Path, shop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a program of the project that still has Steady Queue, in the same database."""
    (tmp_path / "chores.py").write_text(CHORES)
    monkeypatch.syspath_prepend(str(tmp_path))
    info = psycopg.conninfo.conninfo_to_dict(shop)
    environment = os.environ | {
        "PGHOST": str(info["host"]),
        "PGUSER": str(info["user"]),
        "PGDATABASE": str(info["dbname"]),
        "PYTHONPATH": os.pathsep.join(map(str, (steady, tmp_path, ROOT / "python"))),
        "DJANGO_SETTINGS_MODULE": "their_settings",
    }

    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, *arguments], env=environment, text=True)

    assert start("-m", "django", "migrate", "steady_queue", "-v0").wait() == 0
    yield start
    sys.modules.pop("chores", None)


@pytest.fixture
def conn(shop: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(shop, autocommit=True) as connection:
        connection.execute("create table ledger (n int, text text)")
        yield connection


Start = Callable[..., subprocess.Popen[str]]


def moved(capsys: Any, *options: str) -> dict[str, int]:
    call_command("pgdefer", "move-in", "steady-queue", "--json", *options)
    counts: dict[str, int] = json.loads(capsys.readouterr().out)
    return counts


def test_what_arrives(
    app: DjangoApp,
    theirs: Start,
    conn: psycopg.Connection[Any],
    capsys: Any,
    drain: Callable[..., None],
) -> None:
    ann = User.objects.create_user("Ann")
    User.objects.create_user("Bob")
    assert theirs("-c", ENQUEUE).wait() == 0
    expected = {"moved": 9, "limited": 5, "scheduled": 1, "behind": 0, "running": 0}
    expected |= {"failed": 0, "recurring": 0, "paused": 0}
    assert moved(capsys, "--dry-run") == expected
    assert Job.objects.count() == 0
    assert moved(capsys) == expected
    assert moved(capsys) == expected | {"moved": 0, "limited": 0, "scheduled": 0}
    jobs = {job.args["n"]: job for job in Job.objects.order_by("id")}
    assert (jobs[2].queue, jobs[2].priority, jobs[2].task) == ("mail", 7, "chores.note")
    assert jobs[3].state == "scheduled"
    assert jobs[2].headers["steady_queue"] == {"id": 2}
    conn.execute("select queue.tick()")
    limits = conn.execute('select key, "limit" from queue.semaphores order by key').fetchall()
    assert limits == [("one", 1), ("pair", 2)]
    drain()
    ledger = dict(conn.execute("select n, text from ledger").fetchall())
    assert ledger.keys() == {1, 2, *range(5, 10)}
    at = dt.datetime(2026, 1, 2, 3, tzinfo=dt.UTC)
    rest = (at, at.date(), dt.time(4), dt.timedelta(hours=5), [1, {"a": None}])
    assert ledger[1] == repr((rest, [("who", ann)]))
    lost = Job.objects.get(id=jobs[4].id)
    assert (lost.state, "has gone" in lost.error) == ("failed", True)
    unfinished = "select count(*) from steady_queue_job where finished_at is null"
    assert conn.execute(unfinished).fetchone() == (0,)
    assert conn.execute("select count(*) from steady_queue_semaphore").fetchone() == (0,)


def test_workers_of_both_run_beside(
    app: DjangoApp,
    theirs: Start,
    conn: psycopg.Connection[Any],
    capsys: Any,
    drain: Callable[..., None],
) -> None:
    assert theirs("-c", MANY).wait() == 0
    some_ran = "select from ledger offset 20"
    unfinished = "select from steady_queue_job where finished_at is null"
    worker = theirs("-m", "django", "steady_queue", "--disable-autoload")
    try:
        wait_for(lambda: conn.execute(some_ran).rowcount)
        first = moved(capsys)
        assert first["moved"] > 0
        drain()
        wait_for(lambda: not conn.execute(unfinished).rowcount)
    finally:
        worker.terminate()
        worker.wait()
    counts = "select count(*), count(distinct n) from ledger"
    assert conn.execute(counts.encode()).fetchone() == (300, 300)
    assert Job.objects.filter(state="succeeded").count() == first["moved"]
