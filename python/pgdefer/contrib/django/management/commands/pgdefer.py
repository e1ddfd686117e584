"""`manage.py pgdefer ...`: the commands of `pgdefer`, on the project's database and tasks.

Tests: contrib/test_django.py, contrib/test_django_log.py.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import typer
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand
from django.utils import autoreload

from pgdefer.cli._base import Exit, cli
from pgdefer.contrib.django import conf
from pgdefer.contrib.django.application import project_app
from pgdefer.contrib.django.checks import check_aliases
from pgdefer.errors import NotInstalled

__all__ = ["Command"]

log = logging.getLogger("pgdefer")


class Command(BaseCommand):
    """Passes its arguments on, all but those of every management command."""

    help = "The job queue: worker, job, queue, schedule ... as `pgdefer --help` lists them."
    requires_system_checks: list[str] = []  # noqa: RUF012 (Django's own)

    def run_from_argv(self, argv: list[str]) -> None:
        """Run what the command line says, without the options that Django itself reads."""
        own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        own.add_argument("--noreload", action="store_true")
        own.add_argument("--settings")
        own.add_argument("--pythonpath")
        options, arguments = own.parse_known_args(argv[2:])
        reloads = _runs_jobs(arguments) and settings.DEBUG and not options.noreload
        try:
            code = _run(arguments, reloads=reloads)
        except ImproperlyConfigured as error:
            sys.stderr.write(f"pgdefer: {error}\n")
            raise SystemExit(Exit.USAGE) from None
        raise SystemExit(code)

    def add_arguments(self, parser: Any) -> None:
        """Take arguments from call_command."""
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def handle(self, *_args: Any, **options: Any) -> None:
        """Run what `call_command("pgdefer", "worker", "--drain")` says."""
        if code := _run([str(text) for text in options["arguments"]], reloads=False):
            raise SystemExit(code)


def _run(arguments: list[str], *, reloads: bool) -> int:
    """Run a command of `pgdefer`; return its exit code."""
    for wrong in check_aliases(conf.read()):
        raise ImproperlyConfigured(f"{wrong.msg}. {wrong.hint}" if wrong.hint else wrong.msg)
    environment, argv, remedy = dict(os.environ), sys.argv, NotInstalled.remedy
    NotInstalled.remedy = f"Run `{conf.read().migrate_command}`, which installs it."
    reloader = _Reloader(argv) if reloads else None
    if _runs_jobs(arguments):
        # A supervisor starts its processes by these, without Django's command around them.
        os.environ["PGDEFER_APP"] = "pgdefer.contrib.django:app"
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        os.environ.pop("PGDEFER_DSN", None)
    else:
        os.environ["PGDEFER_DSN"] = project_app().source.conninfo()
    sys.argv = ["pgdefer", *arguments]
    try:
        typer.main.get_command(cli).main(arguments, prog_name="manage.py pgdefer")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = argv
        NotInstalled.remedy = remedy
        if reloader is not None:
            reloader.restart_if_changed()
    return 0


def _runs_jobs(arguments: list[str]) -> bool:
    """Whether the command runs jobs: then it has the project's App, not a DSN."""
    return arguments[:1] == ["worker"] and "ls" not in arguments[1:2]


class _Reloader:
    """Restarts the worker when a file of the project has changed.

    Its jobs may end first; a second change aborts them.
    """

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv
        self._has_changed = False
        autoreload.file_changed.connect(self._on_change)
        watch = threading.Thread(target=self._watch, name="pgdefer-reloader", daemon=True)
        watch.start()

    def _watch(self) -> None:
        ready = threading.Thread(target=lambda: None)
        autoreload.get_reloader().run(ready)

    def _on_change(self, sender: object, file_path: Path, **_options: Any) -> bool:
        del sender
        if file_path.suffix == ".py" and file_path.exists():
            try:
                compile(file_path.read_bytes(), str(file_path), "exec")
            except (SyntaxError, ValueError) as error:
                log.error("%s can't be read, so the worker goes on: %s", file_path, error)
                return True
        log.info("%s has changed: the worker restarts", file_path)
        self._has_changed = True
        os.kill(os.getpid(), signal.SIGTERM)
        return True

    def restart_if_changed(self) -> None:
        """Put a new program in this one's place, with the same arguments."""
        if self._has_changed:
            sys.argv = self._argv
            command = autoreload.get_child_arguments()
            os.execv(command[0], command)  # noqa: S606 (this very program)
