"""The list of jobs in the admin: its filters, and its pages.

Tests: contrib/test_django_admin_lists.py.
"""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin, messages
from django.http import HttpRequest

from pgdefer.contrib.django.actions import UncountedList, act, hiding
from pgdefer.contrib.django.application import project_app
from pgdefer.contrib.django.models import Job
from pgdefer.database import sql

__all__ = ["JobChangeList", "QueueFilter", "StateFilter", "TaskFilter"]

BEFORE = "before"
# How many bytes one page may read: this takes a fraction of a second.
MAX_BYTES = 750_000


class _Filter(admin.SimpleListFilter):
    """Holds a filter's value; the list itself does the search."""

    statement: ClassVar[sql.Statement]

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        del request, model_admin
        found: Any = []
        act(lambda: found.extend(project_app().client.call(self.statement, {"word": ""})))
        return [(name, name) for name, *_ in found]  # none without the right to list them

    def has_output(self) -> bool:
        return True

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        del request
        return queryset


class StateFilter(_Filter):
    """By state."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        """Return the states."""
        del request, model_admin
        return [(state, state) for state in Job.STATES]


class QueueFilter(_Filter):
    """By queue."""

    title = "queue"
    parameter_name = "queue"
    statement = sql.QUEUES_LIKE


class TaskFilter(_Filter):
    """By task."""

    title = "task"
    parameter_name = "task"
    statement = sql.TASKS_LIKE


class JobChangeList(UncountedList):
    """A page of jobs, newest first, and a link to older ones, without a count."""

    older: str | None = None

    def get_filters_params(self, params: Any = None) -> Any:
        """Leave out the position of the page, which is not a filter."""
        found = super().get_filters_params(params)
        found.pop(BEFORE, None)
        return found

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> Any:
        """Return all jobs: actions select theirs by id."""
        super().get_queryset(request, exclude_parameters)
        return self.root_queryset

    def get_results(self, request: HttpRequest) -> None:
        """Search for a page of jobs."""
        ids, before = [], None
        with hiding(request):
            found = self._found(request)
        for row in found:
            if row[0] is None:
                before = row[-1]
            else:
                ids.append(row[0])
        rows = {job.id: job for job in self.root_queryset.filter(id__in=ids)}
        self.show(request, [rows[id] for id in ids if id in rows], self.list_per_page)
        if before is not None:
            self.older = self.get_query_string({BEFORE: before})

    def _found(self, request: HttpRequest) -> Any:
        wanted = self.query.strip()
        by = "path" if wanted.startswith("$") else "key" if wanted.startswith("key:") else "text"
        if wanted.isdecimal() and len(wanted) < 19 and self.root_queryset.filter(id=int(wanted)):
            return [(int(wanted),)]
        before = request.GET.get(BEFORE, "")
        parameters = {
            "pattern": wanted.removeprefix("key:") or None,
            "by": by,
            "before": int(before) if before.isdecimal() and len(before) < 19 else None,
            "max_jobs": self.list_per_page,
            "max_bytes": MAX_BYTES,
            **{name: self.params.get(name) or None for name in ("state", "queue", "task")},
        }
        found: Any = []

        def search() -> None:
            found.extend(project_app().client.call(sql.SEARCH, parameters))

        if (refused := act(search)) is not None:
            messages.error(request, refused)
        return found
