"""Django's connection, app, settings, migrations, models, checks and command."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from asgiref.sync import async_to_sync
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import connection, connections, transaction
from django.db.migrations.recorder import MigrationRecorder
from django.test import Client, override_settings
from shop.models import Letter, Order
from shop.tasks import charge, write

from pgdefer import AlreadyQueued, App, Deferral
from pgdefer.contrib.django import conf
from pgdefer.contrib.django.application import DjangoApp
from pgdefer.contrib.django.checks import check_database
from pgdefer.contrib.django.management.commands.pgdefer import Command
from pgdefer.contrib.django.models import Attempt, Job, Queue, ReadOnly, Schedule, Task
from pgdefer.database.embedded import EmbeddedServer
from pgdefer.errors import NotInstalled
from support import ROOT, create_database

from .conftest import order, states, use

pytestmark = pytest.mark.client


@pytest.mark.parametrize("which", ["proxy", "wrapper"])
def test_an_app_takes_djangos_connection(shop: str, which: str) -> None:
    other = App(shop)

    @other.task(name="other", queue="q")
    def task(number: int) -> None: ...

    own = connection if which == "proxy" else connections["default"]
    connections.close_all()  # it connects by itself
    assert own.connection is None
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        task.configure(connection=own).defer(1)
        assert Job.objects.count() == 1
        raise ZeroDivisionError
    assert Job.objects.count() == 0
    with transaction.atomic():
        task.defer_with(own, 2)
        other.defer("named", connection=own)
    assert [(job.task, job.queue, job.args) for job in Job.objects.order_by("id")] == [
        ("other", "q", {"number": 2}),
        ("named", "default", {}),
    ]
    other.close()


def test_no_connection_is_an_error(shop: str, app: DjangoApp) -> None:
    connections.close_all()
    with pytest.raises(TypeError, match="connection is None"):
        write.configure(connection=connection.connection)
    with pytest.raises(TypeError, match="connection is None"):
        app.defer("task", connection=connection.connection)
    assert not Job.objects.exists()


def test_errors_are_the_queues_own(shop: str, app: DjangoApp) -> None:
    one = partial(app.defer, "task", queueing_lock="only")
    one()
    with transaction.atomic():
        with pytest.raises(AlreadyQueued, match="already"), transaction.atomic():
            one()
        assert Order.objects.count() == 0  # the outer one continues


def test_atomic_decides(shop: str, app: DjangoApp) -> None:
    with transaction.atomic():
        outer = write.defer(order(), "kept")
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            write.defer(order(), "rolled back to a savepoint")
            raise ZeroDivisionError
        transaction.on_commit(partial(app.defer, "after"))
        assert Job.objects.count() == 1
    with transaction.atomic(durable=True):
        app.defer("durable")
    assert [job.task for job in Job.objects.order_by("id")] == [
        "shop.tasks.write",
        "after",
        "durable",
    ]
    assert outer.state() == "ready"


def test_async_code_defers_where_django_writes(shop: str, app: DjangoApp) -> None:
    async def view() -> None:
        await Order.objects.acreate(customer="Ann", total=1)
        await app.defer_async("one")
        await write.configure(queue="other").defer_async(await Order.objects.aget(), "two")
        await App(shop).defer_async("three", connection=connection)

    async_to_sync(view)()
    assert [job.task for job in Job.objects.order_by("id")] == ["one", "shop.tasks.write", "three"]


def test_defaults_are_registered_in_the_callers_transaction(shop: str, app: DjangoApp) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        write.defer(order(), "one")
        assert Task.objects.get(name="shop.tasks.write").defaults["queue"] == "mail"
        raise ZeroDivisionError
    assert Task.objects.count() == 0
    job = write.defer(order(), "two")
    assert Job.objects.get(id=job.id).queue == "mail"


def test_an_order_is_processed(shop: str, drain: Callable[..., None]) -> None:
    answer = Client().post("/orders", {"customer": "Ann", "total": "7"})
    assert answer.status_code == 201
    drain()
    assert states() == ["succeeded", "succeeded"]
    assert Order.objects.get().state == "charged"
    assert Letter.objects.get().text == "Thank you, Ann: 7 EUR."
    assert Job.objects.get(task="shop.tasks.charge").result == 7


def test_the_models_are_read_only(shop: str, app: DjangoApp) -> None:
    app.defer("task")
    app.pause("default")
    job = Job.objects.get()
    writes: list[Callable[[], object]] = [
        job.delete,
        Job().save,
        lambda: Job.objects.create(task="other"),
        lambda: Task.objects.update(defaults={}),
        lambda: Task.objects.filter(name="x").delete(),
        lambda: Task.objects.bulk_create([Task(name="x", defaults={})]),
        lambda: Task.objects.bulk_update([Task(name="x", defaults={})], ["defaults"]),
        job.history.clear,
        lambda: async_to_sync(Task.objects.all().aupdate)(defaults={}),
    ]
    for change in writes:
        with pytest.raises(ReadOnly, match="can't be written") as caught:
            change()
        assert caught.value.hint
    assert Queue.objects.get().paused_until.year == 9999
    assert list(job.history.all()) == []
    assert Attempt.objects.select_related("job").count() == 0


def test_migrations_are_complete(shop: str) -> None:
    call_command("makemigrations", "--check", "--dry-run", verbosity=0)


def test_migrations_install_and_remove(server: EmbeddedServer, shop: str, app: DjangoApp) -> None:
    text = io.StringIO()
    call_command("sqlmigrate", "pgdefer", "0001", stdout=text)
    assert "create or replace function queue.defer(" in text.getvalue()
    job = app.defer("task")
    with pytest.raises(Exception, match="removes every job"):
        call_command("migrate", "pgdefer", "zero", verbosity=0)
    assert job.state() == "ready"
    job.cancel()
    create_database(server, "django_plain")
    use(server, "django_plain")
    with override_settings(PGDEFER={"FORM": "plain"}):
        call_command("migrate", "pgdefer", verbosity=0)
        call_command("migrate", "pgdefer", "zero", verbosity=0)
        call_command("migrate", "pgdefer", verbosity=0)
    assert Job.objects.count() == 0
    use(server, "django")


def test_migrating_back_waits_for_a_job_that_is_being_deferred(shop: str, app: DjangoApp) -> None:
    def back() -> str:
        try:
            call_command("migrate", "pgdefer", "zero", verbosity=0)
        except Exception as error:
            return str(error)
        finally:
            connections.close_all()
        return "the queue is removed"

    with ThreadPoolExecutor(1) as threads:
        with psycopg.connect(shop) as connection:
            connection.execute("select queue.defer('task')")
            removed = threads.submit(back)
            with psycopg.connect(shop, autocommit=True) as other:
                waits = "select from pg_locks where not granted and database is not null"
                while not other.execute(waits).rowcount:
                    time.sleep(0.01)
        assert "removes every job" in removed.result(300)
    assert Job.objects.count() == 1


def messages(settings: Any, **options: Any) -> list[str]:
    with override_settings(PGDEFER=settings):
        return [m.id for m in checks.run_checks(**options) if m.id.startswith("pgdefer")]


def test_the_checks_find_what_is_wrong(
    server: EmbeddedServer, shop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert messages({}, databases=["default"]) == []
    assert messages({"DATABSE": "x"}) == ["pgdefer.E001"]
    assert messages({"DATABASE": "x"}) == ["pgdefer.E002"]
    assert messages({"MIDDLEWARE": ["no.such"]}) == ["pgdefer.E004"]
    assert messages({"DEFER_MIDDLEWARE": ["no.such"]}) == ["pgdefer.E004"]
    assert messages({"IMPORTS": ["nomod"]}) == ["pgdefer.E004"]
    assert messages({"IMPORTS": ("shop.tasks",)}) == []
    assert messages({"DEFAULTS": {"retry": 3, "queue": "mail"}}) == []
    for wrong in ({"nope": 1}, {"retry": "x"}, {"priority": "high"}):
        assert messages({"DEFAULTS": wrong}) == ["pgdefer.E005"]
    create_database(server, "django_blank")
    use(server, "django_blank")
    assert messages({}, databases=["default"]) == ["pgdefer.W001"]
    otherwise = "; where that has nothing to do, manage.py pgdefer install"
    assert check_database(databases=["default"])[0].hint == f"manage.py migrate{otherwise}"
    monkeypatch.setitem(connections.settings, "jobs", connections.settings["default"])
    with override_settings(PGDEFER={"DATABASE": "jobs"}):
        (found,) = check_database(databases=["jobs"])
    assert found.hint == f"manage.py migrate pgdefer --database jobs{otherwise}"
    connections["jobs"].close()
    del connections["jobs"]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["manage.py", "migrate"])
        assert messages({}, databases=["default"]) == [], "it installs the queue"
        MigrationRecorder(connection).record_applied("pgdefer", "0001_install")
        assert messages({}, databases=["default"]) == ["pgdefer.W001"], "it has nothing to do"
    use(server, "no_such_database")
    assert messages({}, databases=["default"]) == ["pgdefer.W003"]
    assert "no_such_database" in check_database(databases=["default"])[0].msg
    use(server, "django")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"DATABSE": "x", 5: 6}, "PGDEFER has no key 5, DATABSE: it has DATABASE, DEFAULTS, "),
        (5, "PGDEFER must be a dict, not 5"),
        ({"FORM": "zz"}, "'FORM'. must be one of auto, extension, plain, not 'zz'"),
        ({"DEFAULTS": None}, "'DEFAULTS'. must be a dict, not None"),
        ({"IMPORTS": "x"}, "'IMPORTS'. must be a list of names, not 'x'"),
        ({"MIDDLEWARE": [5]}, "'MIDDLEWARE'. must be a list of names, not"),
        ({"DEFER_MIDDLEWARE": "x"}, "'DEFER_MIDDLEWARE'. must be a list of names, not 'x'"),
        ({"HEADERS": 5}, "'HEADERS'. must be a name or None, not 5"),
        ({"DATABASE": None}, "'DATABASE'. must be a name, not None"),
        ({"PGBOUNCER": "yes"}, "'PGBOUNCER'. must be True or False, not 'yes'"),
    ],
)
def test_what_is_no_setting(settings: Any, said: str) -> None:
    with override_settings(PGDEFER=settings), pytest.raises(ImproperlyConfigured, match=said):
        conf.read()
    assert messages(settings) == ["pgdefer.E001"]


deferrals: list[Deferral] = []


@contextlib.contextmanager
def note_deferral(deferral: Deferral) -> Iterator[None]:
    yield
    deferrals.append(deferral)


def test_middleware_surrounds_calls_that_defer(shop: str) -> None:
    deferrals.clear()
    project = DjangoApp(conf.Settings(DEFER_MIDDLEWARE=[f"{__name__}.note_deferral"]))
    one = project.defer("one", {"n": 1})
    assert [(call.task, call.args) for d in deferrals for call in d.calls] == [("one", '{"n":1}')]
    assert [job.id for job in deferrals[0].jobs] == [one.id]


@pytest.mark.parametrize("command", ["check", "pgdefer job ls", "pgdefer worker --drain"])
def test_commands_name_a_wrong_setting(tmp_path: Path, command: str) -> None:
    apps = ["admin", "auth", "contenttypes", "messages", "sessions"]
    names = [*(f"django.contrib.{name}" for name in apps), "pgdefer.contrib.django"]
    text = f"INSTALLED_APPS = {names}\nPGDEFER = {{'DATABSE': 'x'}}\n"
    (tmp_path / "wrong_settings.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "django", *command.split(), "--settings", "wrong_settings"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "python")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "PGDEFER has no key DATABSE: it has DATABASE, " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["job", "ls"], ["worker", "--drain"], ["version"]])
def test_commands_need_postgresql(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, dsn: str, command: list[str]
) -> None:
    """They don't take the database that libpq finds instead."""
    monkeypatch.setenv("PGDEFER_DSN", dsn)
    engine = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    monkeypatch.setitem(connections.settings, "lite", connections.settings["default"] | engine)
    for alias, said in (
        ("lite", "'lite', which is not PostgreSQL with psycopg 3. ENGINE is "),
        ("none", "'none', not in DATABASES"),
    ):
        with override_settings(PGDEFER={"DATABASE": alias}), pytest.raises(SystemExit) as end:
            Command().run_from_argv(["manage.py", "pgdefer", *command])
        assert end.value.code == 2
        assert f"PGDEFER['DATABASE'] is {said}" in capsys.readouterr().err


@pytest.mark.parametrize("origin", ["django-tasks-db", "steady-queue"])
def test_moving_in_needs_djangos_tasks(
    shop: str, capsys: Any, monkeypatch: pytest.MonkeyPatch, origin: str
) -> None:
    monkeypatch.delitem(sys.modules, "pgdefer.contrib.django.move_in", raising=False)
    monkeypatch.setitem(sys.modules, "django.tasks", None)  # as in Django 5.2
    with pytest.raises(SystemExit):
        call_command("pgdefer", "move-in", origin)
    assert f"move-in {origin} needs Django 6" in capsys.readouterr().err


def test_the_worker_has_the_role_that_django_assumes(shop: str, app: DjangoApp) -> None:
    with psycopg.connect(shop, autocommit=True) as owner:
        owner.execute('create role "django\\ assumed"')
        options = connections["default"].settings_dict["OPTIONS"]
        before = dict(options)
        options["assume_role"] = "django\\ assumed"
        try:
            with app.source.connect() as connection:
                assert connection.execute("select current_user").fetchone() == ("django\\ assumed",)
        finally:
            options.clear()
            options.update(before)
            owner.execute('drop role "django\\ assumed"')


def test_the_command_passes_every_operation_on(shop: str, app: DjangoApp, capfd: Any) -> None:
    id = app.defer("task").id
    call_command("pgdefer", "job", "cancel", str(id), "--yes")
    assert states() == ["cancelled"]
    capfd.readouterr()
    call_command("pgdefer", "job", "show", str(id), "--json")
    assert json.loads(capfd.readouterr().out)["state"] == "cancelled"
    with pytest.raises(SystemExit) as end:
        call_command("pgdefer", "job", "show", "7777")
    assert end.value.code == 9


@pytest.mark.parametrize("command", [["job", "ls"], ["upgrade"]])
def test_the_command_before_migrate_names_that(
    shop: str, server: EmbeddedServer, capfd: Any, command: list[str]
) -> None:
    create_database(server, before := f"django_before_{command[0]}")
    use(server, before)
    try:
        with pytest.raises(SystemExit) as end:
            call_command("pgdefer", *command)
    finally:
        use(server, "django")
    assert end.value.code == 4
    assert "Run `manage.py migrate`, which installs it." in capfd.readouterr().err
    assert "pgdefer install" in NotInstalled.remedy


@pytest.mark.usefixtures("own_tasks")
def test_a_task_of_a_module_that_no_worker_imports(
    app: DjangoApp, drain: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """The module may be anywhere in an installed app: importing it could do anything."""
    job = app.defer("shop.admin.remind")
    drain()
    assert job.state() == "scheduled"
    said = [each.message for each in caplog.records if "does not know" in each.message]
    assert [text.partition("To run it here: ")[2] for text in said] == [app.import_hint]
    assert 'PGDEFER["IMPORTS"]' in app.import_hint


def test_the_command_runs_the_projects_jobs(shop: str, app: DjangoApp) -> None:
    job = charge.defer(order(), "Ann")
    call_command("pgdefer", "worker", "--drain")
    assert job.result(10) == 7
    assert Schedule.objects.get().task == "shop.tasks.forget_old_orders"
