"""The tests of a third-party backend, django-tasks-db, with this backend in its place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pgdefer.database.embedded import EmbeddedServer
from support import ROOT

pytest.importorskip("django.tasks", reason="the backend of TASKS needs Django 6, so Python 3.12")

from .conftest import PROJECT
from .test_django_own import RUN, sdist

pytestmark = [pytest.mark.client, pytest.mark.long]

VERSION = "0.13.0"

# The sdist lacks this module; the tests say what is in it.
TASKS = """
import sys
from django.tasks import TaskContext, task

@task()
def noop_task(*args, **kwargs): return None

@task()
async def noop_task_async(*args, **kwargs): return None

@task()
def calculate_meaning_of_life(): return 42

@task()
def failing_task_value_error(): raise ValueError("This task failed due to ValueError")

@task()
def complex_exception(): raise ValueError(ValueError("This task failed"))

@task()
def complex_return_value(): return lambda: True

@task()
def exit_task(): sys.exit(1)

@task(takes_context=True)
def get_task_id(context): return context.task_result.id

@task(takes_context=True)
def test_context(context, attempt):
    assert isinstance(context, TaskContext)
    assert context.attempt == attempt
"""
CHANGES = (
    (r"from django_tasks_db import .*?(?=from tests import)", "from own_tasks_db import *\n"),
    (r'"django_tasks_db\.DatabaseBackend"', '"own_tasks_db.DatabaseBackend"'),
    (r'"django_tasks_db", errors', '"pgdefer.contrib.django", errors'),
    (r"Case\(TransactionTestCase\)", "Case(CleanTestCase)"),
    (r'call_command,\s+"db_worker",', "run_worker,"),
    # Here an id is a number.
    (r"uuid\.UUID\(result\.id\)\.version, 4", "int(result.id) > 0, True"),
)

PASS = {
    "DatabaseBackendTestCase": """
        test_using_correct_backend test_enqueue_task test_enqueue_task_async test_get_result
        test_get_result_async test_refresh_result test_refresh_result_async
        test_get_missing_result test_async_get_missing_result test_invalid_uuid
        test_async_invalid_uuid test_check test_database_backend_app_missing
        test_doesnt_wait_until_transaction_commit test_enqueue_logs test_run_after_tz
        test_validate_on_enqueue test_validate_on_aenqueue""",
    "DatabaseBackendWorkerTestCase": """
        test_run_enqueued_task test_batch_processes_all_tasks test_no_tasks
        test_doesnt_process_different_queue test_process_all_queues test_failing_task
        test_complex_exception test_run_after test_worker_doesnt_exit_on_failure test_max_tasks
        test_takes_context test_context""",
}
# As in Django's own: a job whose result can't be stored has succeeded.
FAIL = {"DatabaseBackendWorkerTestCase": "test_complex_return_value"}
# Of its table, its ids, its commands, its admin: the tests that docs/django.md counts as left out.
SKIP = {
    "DatabaseBackendTestCase": """
        test_invalid_task_path test_missing_task_path test_task_name test_priority_range_check
        test_index_scan_for_ready test_run_after_null_0016_migration test_custom_id_function
        test_unknown_id_function test_postgres_db_id_function
        test_postgres_id_function_expression""",
    "DatabaseBackendWorkerTestCase": """
        test_process_all_queues_excluding_one_queue
        test_exclude_queues_requires_processing_all_queues
        test_excluding_unknown_queue_processes_selected_queues test_doesnt_process_different_backend
        test_unknown_backend test_incorrect_backend test_negative_interval test_infinite_interval
        test_fractional_interval test_zero_interval test_negative_max_tasks test_zero_max_tasks
        test_too_long_worker_id test_empty_worker_id test_run_after_priority test_verbose_logging
        test_invalid_task_path test_missing_task_path test_worker_with_locked_rows
        test_task_import_string""",
}
SKIPPED_CLASSES = {
    "DatabaseTaskResultTestCase": 7,
    "ConnectionExclusiveTranscationTestCase": 1,
    "DatabaseBackendPruneTaskResultsTestCase": 12,
    "DatabaseWorkerProcessTestCase": 8,
    "CompatTestCase": 1,
    "DBTaskResultOrderingTestCase": 3,
    "AdminTestCase": 2,
}


def labels(named: dict[str, str]) -> set[str]:
    return {f"{kind}.{name}" for kind, names in named.items() for name in names.split()}


def test_every_test_is_named(tmp_path: Path) -> None:
    """No test is forgotten: it passes, fails or is left out, all by name."""
    text = source(tmp_path).read_text("utf-8")
    found: dict[str, set[str]] = {}
    for block in re.split(r"^class ", text, flags=re.MULTILINE)[1:]:
        names = re.findall(r"^    (?:async )?def (test_\w+)", block, re.MULTILINE)
        found[block.partition("(")[0]] = set(names)
    left_out = {name: len(found.pop(name)) for name in SKIPPED_CLASSES}
    assert left_out == SKIPPED_CLASSES
    assert {f"{kind}.{name}" for kind, names in found.items() for name in names} == (
        labels(PASS) | labels(FAIL) | labels(SKIP)
    )


def source(folder: Path) -> Path:
    return sdist(f"django-tasks-db=={VERSION}", folder, "PGDEFER_TASKS_DB_SDIST") / "tests/tests.py"


def test_its_tests(server: EmbeddedServer, tmp_path: Path) -> None:
    file = source(tmp_path)
    text = file.read_text("utf-8")
    # The classes that are left out follow the others.
    rest = text.index(f"class {next(iter(SKIPPED_CLASSES))}")
    text = text[: text.rindex("@override_settings", 0, rest)]
    for old, new in CHANGES:
        text, count = re.subn(old, new, text, flags=re.DOTALL)
        assert count, old
    file.write_text(text)
    (file.parent / "__init__.py").touch()
    (file.parent / "tasks.py").write_text(TASKS)
    folders = (ROOT / "python", Path(__file__).parent, PROJECT, file.parents[1])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "PGHOST": str(server.socket_folder),
        "PGUSER": "postgres",
        "PGDATABASE": "own_tasks_db",
        "DJANGO_ALLOW_ASYNC_UNSAFE": "1",
    }
    chosen = [f"tests.tests.{name}" for name in sorted(labels(PASS) | labels(FAIL))]
    queues = "\nsettings.TASKS['default']['QUEUES'] = ['default', 'queue-1']\nimport django"
    command = [sys.executable, "-c", RUN.replace("\nimport django", queues), *chosen]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    ran = re.search(r"^Ran (\d+) tests", done.stderr, re.MULTILINE)
    assert ran is not None, done.stderr
    assert int(ran[1]) == len(chosen)
    assert "skipped" not in done.stderr.splitlines()[-1]
    failed = re.findall(r"^(?:ERROR|FAIL): (\w+) \(tests\.tests\.(\w+)", done.stderr, re.MULTILINE)
    assert {f"{kind}.{name}" for name, kind in failed} == labels(FAIL), done.stderr
