"""The tasks of one part of an application, which an App includes: `app.include(blueprint)`.

Tests: integration/test_blueprints.py.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from pgdefer.client.base import Refusal
from pgdefer.client.client import Client
from pgdefer.database.source import Source
from pgdefer.tasks.defining import Defining
from pgdefer.tasks.middleware import check_task_middleware
from pgdefer.tasks.option_checks import check_options
from pgdefer.tasks.registry import check_names, module_name
from pgdefer.tasks.task import AllTaskOptions

__all__ = ["Blueprint"]


class Blueprint(Defining):
    """Tasks and schedules that are defined without an App, and included in one later.

    `defaults` are options for all its tasks; a task's own options override them. The args of its
    schedules can't contain values of types that the App's codec learns by `register`. Tasks that
    run in processes need an App of their own.
    """

    def __init__(self, *, defaults: AllTaskOptions | None = None) -> None:
        name = module_name(sys._getframe(1).f_globals["__name__"])
        client = Client(Source(None))
        client.stand_in = Refusal(
            f"no App has included the blueprint of {name}: call app.include(blueprint) "
            "before deferring its tasks"
        )
        super().__init__(client, name, ())
        if defaults is not None and not isinstance(defaults, Mapping):
            raise TypeError(f"defaults must be a dict of a task's options, not {defaults!r}")
        check_options("Blueprint(defaults=...)", defaults or {}, AllTaskOptions)
        self.defaults: Mapping[str, Any] = dict(defaults or {})
        self._is_included = False

    def include_in(self, app: Defining, namespace: str) -> None:
        """Add the tasks and schedules to an App, with names within it.

        Raises ValueError or TypeError, and adds nothing, if a name is taken, if the App has
        middleware that does not fit, if a task runs in processes, or if the blueprint was included
        before.
        """
        if self._is_included:
            raise ValueError(f"the blueprint of {self.name} was included before")
        tasks = list(dict.fromkeys(self.tasks.values()))
        for task in tasks:
            if task.execution.run_in == "process":
                raise ValueError(
                    f"the task {task.name!r} runs in processes, which do not know the blueprint: "
                    "define it by @app.task"
                )
            name = f"{namespace}{task.name}"
            check_names(app.tasks, task, [name, *task.aliases])
            check_task_middleware(name, app.client.middleware, is_async=task.is_async)
        schedules = {
            f"{namespace}{name}": dataclasses.replace(
                schedule, name=f"{namespace}{name}", task=f"{namespace}{schedule.task}"
            )
            for name, schedule in self.schedules.items()
        }
        for name, schedule in schedules.items():
            if app.schedules.get(name, schedule) != schedule:
                raise ValueError(f"there are two schedules named {name!r}")
        self._is_included = True
        for task in tasks:
            task.include_in(app.client, namespace)
            app.add(task)
        self.schedules = schedules
        app.schedules.update(schedules)
