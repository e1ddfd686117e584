"""The queue in the admin: shows it, and offers what an operator may do.

Tests: contrib/test_django_admin.py, contrib/test_django_browser.py.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin.options import ShowFacets
from django.contrib.admin.utils import display_for_value
from django.contrib.admin.views.main import ChangeList
from django.http import HttpRequest
from django.template.defaultfilters import filesizeformat
from django.utils.translation import gettext_lazy as _

from pgdefer.contrib.django.actions import (
    HidingAdmin,
    UncountedList,
    act_on_each,
    hiding,
    may,
    permitted,
)
from pgdefer.contrib.django.admin_jobs import JobAdmin
from pgdefer.contrib.django.application import project_app
from pgdefer.contrib.django.models import (
    Job,
    Lock,
    Queue,
    Schedule,
    ScheduleRun,
    Semaphore,
    Task,
    Worker,
)
from pgdefer.database import sql
from pgdefer.database.source import LAST

__all__ = [
    "LockAdmin",
    "QueueAdmin",
    "ScheduleAdmin",
    "SemaphoreAdmin",
    "TaskAdmin",
    "ViewAdmin",
    "WorkerAdmin",
]

admin.site.register(Job, JobAdmin)


# How many rows of a view a page shows; search for others.
MAX_ROWS = 500


class ViewChangeList(UncountedList):
    """All rows on one page, read once: counting them costs as much as reading them."""

    def get_results(self, request: HttpRequest) -> None:
        """Read the rows."""
        with permitted(), hiding(request):
            rows = list(self.queryset[:MAX_ROWS])
        self.show(request, rows, MAX_ROWS)


class ViewAdmin(HidingAdmin):
    """Rows of a view: users who may view or change them see them; users who may change them act."""

    show_facets = ShowFacets.NEVER
    show_full_result_count = False

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Allow the list's own filters only: others could ask for what is hidden."""
        del request
        return lookup.removesuffix("__exact") in self.list_filter and "\0" not in value

    def get_changelist(self, request: HttpRequest, **_options: Any) -> type[ChangeList]:
        """Return the list that does not count."""
        del request
        return ViewChangeList

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Nobody adds a row of a view."""
        del request
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody edits a row of a view."""
        del request, obj
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody deletes a row of a view."""
        del request, obj
        return False

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may act on such rows."""
        return may(request, self.model, "change")


@admin.register(Queue)
class QueueAdmin(ViewAdmin):
    """Queues: pause and resume."""

    list_display = ("name", "ready", "running", "max_running", "paused")
    fields = (
        "name",
        "created_at",
        "max_running",
        "rate_limit",
        "rate_per",
        "retain",
        "ready",
        "running",
        "paused",
    )
    readonly_fields = ("paused",)
    search_fields = ("name",)
    actions = ("pause", "resume")

    @admin.display(description=_("paused"), ordering="paused_until")
    def paused(self, queue: Queue) -> str | None:
        """Return until when it is paused."""
        end = queue.paused_until
        if end is None:
            return None
        if end.year == LAST.year:  # infinity
            return str(_("until resumed"))
        return f"{_('until')} {display_for_value(end, '')}"

    @admin.action(description=_("Pause"), permissions=["operate"])
    def pause(self, request: HttpRequest, queryset: Any) -> None:
        """Pause until somebody resumes."""
        act_on_each(self, request, queryset, lambda queue: project_app().pause(queue.name))

    @admin.action(description=_("Resume"), permissions=["operate"])
    def resume(self, request: HttpRequest, queryset: Any) -> None:
        """End a pause."""
        act_on_each(self, request, queryset, lambda queue: project_app().resume(queue.name))


@admin.register(Task)
class TaskAdmin(ViewAdmin):
    """Tasks: pause and resume, on all queues."""

    list_display = ("name", "defaults", "paused_in")
    search_fields = ("name",)
    actions = ("pause", "resume")

    @admin.action(description=_("Pause"), permissions=["operate"])
    def pause(self, request: HttpRequest, queryset: Any) -> None:
        """Pause until somebody resumes."""
        act_on_each(self, request, queryset, lambda task: project_app().pause(task=task.name))

    @admin.action(description=_("Resume"), permissions=["operate"])
    def resume(self, request: HttpRequest, queryset: Any) -> None:
        """End a pause."""
        act_on_each(self, request, queryset, lambda task: project_app().resume(task=task.name))


class _Runs(admin.TabularInline):  # type: ignore[type-arg]
    model = ScheduleRun
    fields = ("run_at", "job_id", "skipped", "detail", "manual")
    readonly_fields = ("job_id",)
    ordering = ("-run_at",)
    can_delete = False
    max_num = 0

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        del obj
        return may(request, Schedule, "view") or may(request, Schedule, "change")

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        del request, obj
        return False

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        del request, obj
        return False


@admin.register(Schedule)
class ScheduleAdmin(ViewAdmin):
    """Recurring runs: run now, disable and enable."""

    list_display = ("name", "cron", "timezone", "task", "enabled", "next_run_at", "reason")
    list_filter = ("enabled",)
    search_fields = ("name", "task")
    actions = ("run_now", "disable", "enable")
    inlines = (_Runs,)

    @admin.action(description=_("Run now"), permissions=["operate"])
    def run_now(self, request: HttpRequest, queryset: Any) -> None:
        """Defer a run's job now."""
        self._each(request, queryset, sql.RUN_NOW)

    @admin.action(description=_("Disable"), permissions=["operate"])
    def disable(self, request: HttpRequest, queryset: Any) -> None:
        """Stop runs until the schedules are enabled."""
        self._each(request, queryset, sql.ENABLE_SCHEDULE, enabled=False)

    @admin.action(description=_("Enable"), permissions=["operate"])
    def enable(self, request: HttpRequest, queryset: Any) -> None:
        """Start runs again."""
        self._each(request, queryset, sql.ENABLE_SCHEDULE, enabled=True)

    def _each(
        self, request: HttpRequest, queryset: Any, statement: sql.Statement, **values: Any
    ) -> None:
        def act(schedule: Any) -> object:
            return project_app().client.call(statement, {"name": schedule.name, **values})

        act_on_each(self, request, queryset, act)


@admin.register(Worker)
class WorkerAdmin(ViewAdmin):
    """Workers."""

    list_display = (
        "name",
        "id",
        "is_alive",
        "running",
        "queues",
        "resident",
        "last_seen_at",
        "registered_at",
    )

    @admin.display(description=_("memory"), ordering="memory")
    def resident(self, worker: Worker) -> str | None:
        """Return how much memory its processes have, if its last heartbeat said so."""
        return None if worker.memory is None else filesizeformat(worker.memory)


@admin.register(Lock)
class LockAdmin(ViewAdmin):
    """Locks with unfinished jobs."""

    # Not the job itself, which would be read for each row.
    list_display = ("lock", "job_id", "running", "waiting", "has_mutex")
    search_fields = ("lock",)


@admin.register(Semaphore)
class SemaphoreAdmin(ViewAdmin):
    """Limits, and their usage."""

    list_display = ("key", "kind", "limit", "used", "ready", "waiting")
    # The list shows all that there is; a key may be that of several kinds.
    list_display_links = None
    list_filter = ("kind",)
    search_fields = ("key",)

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Any:
        """Return a row, None if its key does not say which one is meant."""
        try:
            return super().get_object(request, object_id, from_field)
        except Semaphore.MultipleObjectsReturned:
            return None
