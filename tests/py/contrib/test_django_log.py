"""The log of `manage.py pgdefer worker`, in projects with and without LOGGING."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgdefer.contrib.django.application import DjangoApp
from support import ROOT

from .conftest import PROJECT

pytestmark = pytest.mark.client

CONSOLE = {
    "version": 1,
    "formatters": {"own": {"format": "own %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "own"}},
}
OF_QUEUE = {**CONSOLE, "loggers": {"pgdefer": {"handlers": ["console"], "level": "INFO"}}}
OF_ALL = {
    **CONSOLE,
    "handlers": {"console": {**CONSOLE["handlers"]["console"], "level": "WARNING"}},  # type: ignore[index]
    "root": {"handlers": ["console"], "level": "WARNING"},
}
SAYING = """
import contextlib, logging

@contextlib.contextmanager
def say(job):
    for name in ("django.shop", "elsewhere"):
        logging.getLogger(name).warning("%s has succeeded", name)
    logging.getLogger("django.tasks").info("state=SUCCESSFUL: it has succeeded")
    yield

PGDEFER = {"MIDDLEWARE": ["log_settings.say"]}
"""
# Tasks of the queue, and one of Django's own backend, which says alone that it has failed.
FAILING = """
from django.tasks import task

@task
def fail():
    away.enqueue()
    raise KeyError("of the queue")

@task(backend="immediate")
def away():
    raise KeyError("of Django")
"""
TASKS = """
TASKS = {
    "default": {"BACKEND": "pgdefer.contrib.django.backend.PgDeferBackend"},
    "immediate": {"BACKEND": "django.tasks.backends.immediate.ImmediateBackend"},
}
PGDEFER = {"IMPORTS": ["failing"]}
"""
ELSEWHERE = {**CONSOLE, "loggers": {"shop": {"handlers": ["console"]}}}


PROCESSES = [
    pytest.param((), id="one"),
    pytest.param(("--processes", "1"), id="processes", marks=pytest.mark.long),
]


def log(
    app: DjangoApp, shop: str, folder: Path, logging: Any, *options: str, more: str = ""
) -> list[str]:
    """Return the lines about a job's success, as a worker with these settings writes them."""
    app.defer("shop.tasks.forget_old_orders", {"scheduled_for": "2030-01-01T00:00:00Z"})
    said = whole_log(shop, folder, logging, *options, more=more)
    return [line for line in said.splitlines() if "succeeded" in line]


def whole_log(shop: str, folder: Path, logging: Any, *options: str, more: str = "") -> str:
    """Return what a worker with these settings writes while it runs all jobs."""
    text = f"from shop.settings import *\n\nLOGGING = {logging!r}\n{more}"
    (folder / "log_settings.py").write_text(text)
    info = psycopg.conninfo.conninfo_to_dict(shop)
    environment = os.environ | {
        "PGHOST": str(info["host"]),
        "PGUSER": str(info["user"]),
        "PGDATABASE": str(info["dbname"]),
        "PYTHONPATH": f"{ROOT / 'python'}{os.pathsep}{folder}",
        "DJANGO_SETTINGS_MODULE": "log_settings",
    }
    command = [sys.executable, str(PROJECT / "manage.py"), "pgdefer", "worker", "--drain", *options]
    done = subprocess.run(
        command, env=environment, capture_output=True, check=False, cwd=PROJECT, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("options", PROCESSES)
def test_the_projects_log_is_left_alone(
    app: DjangoApp, shop: str, tmp_path: Path, options: tuple[str, ...]
) -> None:
    (line,) = log(app, shop, tmp_path, OF_QUEUE, *options)
    assert line.startswith("own INFO pgdefer.job: ")
    assert log(app, shop, tmp_path, OF_ALL, *options) == []


def test_options_take_effect_once(app: DjangoApp, shop: str, tmp_path: Path) -> None:
    (line,) = log(app, shop, tmp_path, OF_QUEUE, "--log-format", "json")
    assert json.loads(line)["logger"] == "pgdefer.job"
    (line,) = log(app, shop, tmp_path, OF_ALL, "--log-level", "info")
    assert line.startswith("own INFO pgdefer.job: ")
    assert log(app, shop, tmp_path, OF_QUEUE, "--log-level", "warning") == []
    (line,) = log(app, shop, tmp_path, OF_ALL, "--log-level", "info", "--log-format", "json")
    assert json.loads(line)["level"] == "INFO"


@pytest.mark.parametrize("options", PROCESSES)
@pytest.mark.parametrize("logging", [{}, ELSEWHERE], ids=["none", "elsewhere"])
def test_a_project_without_a_log_of_the_queue(
    app: DjangoApp, shop: str, tmp_path: Path, logging: Any, options: tuple[str, ...]
) -> None:
    assert log(app, shop, tmp_path, logging, *options) == []
    (line,) = log(app, shop, tmp_path, logging, "--log-level", "info", *options)
    assert " INFO pgdefer.job: " in line
    (line,) = log(app, shop, tmp_path, logging, "-v", "--log-format", "json", *options)
    assert json.loads(line)["logger"] == "pgdefer.job"


def test_what_django_says_is_written_once_and_without_successes(
    app: DjangoApp, shop: str, tmp_path: Path
) -> None:
    first, second = log(app, shop, tmp_path, {}, more=f"{SAYING}DEBUG = True\n")
    assert first == "django.shop has succeeded"
    assert second.endswith(" WARNING elsewhere: elsewhere has succeeded")
    more = f"{SAYING}DEBUG = False\n"
    first, _ = log(app, shop, tmp_path, {}, more=more)
    assert first.endswith(" WARNING django.shop: django.shop has succeeded")
    said = log(app, shop, tmp_path, {}, "--log-level", "info", more=more)
    assert [line for line in said if " INFO django.tasks: state=SUCCESSFUL" in line]


@pytest.mark.parametrize("debug", [True, False])
@pytest.mark.parametrize("options", [(), ("--log-format", "json")], ids=["text", "json"])
def test_the_traceback_of_a_django_task_is_written_once(
    app: DjangoApp, shop: str, tmp_path: Path, debug: bool, options: tuple[str, ...]
) -> None:
    pytest.importorskip("django.tasks")
    (tmp_path / "failing.py").write_text(FAILING)
    app.defer("failing.fail")
    said = whole_log(shop, tmp_path, {}, *options, more=f"{TASKS}DEBUG = {debug}\n")
    assert said.count("raise KeyError") == 2 + (debug and bool(options)), said
    assert "fail attempt 1" in said
    assert "path=failing.fail" not in said
    assert "path=failing.away state=FAILED" in said
