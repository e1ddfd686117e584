"""Jobs in the admin: found by `queue.search`, one page at a time, however many there are.

Tests: contrib/test_django_admin.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.options import ShowFacets
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied, ValidationError
from django.db.models import Func, TextField
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext_lazy as _

from pgdefer._text import first_line
from pgdefer.contrib.django.actions import HidingAdmin, act, act_on_each, may
from pgdefer.contrib.django.admin_job_list import (
    JobChangeList,
    QueueFilter,
    StateFilter,
    TaskFilter,
)
from pgdefer.contrib.django.application import project_app
from pgdefer.contrib.django.models import Job
from pgdefer.database import sql
from pgdefer.errors import PgDeferError
from pgdefer.options import ENDED

__all__ = ["JobAdmin"]

ACTIONS: dict[str, tuple[Any, Callable[[int], object]]] = {
    "retry": (_("Retry"), lambda id: project_app().job(id).retry()),
    "cancel": (_("Cancel"), lambda id: project_app().job(id).cancel()),
    "abort": (_("Cancel, or abort"), lambda id: project_app().job(id).cancel(abort=True)),
    "hold": (_("Hold"), lambda id: project_app().job(id).hold()),
    "unhold": (_("Unhold"), lambda id: project_app().job(id).unhold()),
    "run_now": (_("Run now"), lambda id: project_app().job(id).reschedule()),
    "delete": (_("Delete"), lambda id: project_app().job(id).delete()),
}
# The states in which a job's page offers an action; the database decides whether it is allowed.
WAITING = ("scheduled", "waiting", "upstream_failed", "blocked", "ready")
OFFERED = {
    "retry": ("failed", "cancelled", "scheduled"),
    "cancel": (*WAITING, "held"),
    "abort": ("running",),
    "hold": WAITING,
    "unhold": ("held",),
    "run_now": ("scheduled",),
    "delete": (*WAITING, "held", *ENDED),
}
ASKING = ("abort", "delete")  # what cannot be undone


def _action(name: str) -> Any:
    """Return an action on many jobs."""
    label, function = ACTIONS[name]
    permission = "erase" if name == "delete" else "operate"

    @admin.action(description=label, permissions=[permission])
    def action(model_admin: Any, request: HttpRequest, queryset: Any) -> HttpResponse | None:
        jobs = list(queryset)
        if _must_ask(request, name):
            return _question(model_admin, request, name, jobs, request.get_full_path())
        if name == "retry":
            jobs = _without_succeeded(model_admin, request, jobs)
        act_on_each(model_admin, request, jobs, lambda job: function(job.id))
        return None

    action.__name__ = f"{name}_jobs"
    return action


def _must_ask(request: HttpRequest, name: str) -> bool:
    return name in ASKING and "confirmed" not in request.POST


def _question(
    model_admin: Any, request: HttpRequest, name: str, jobs: list[Job], back: str
) -> TemplateResponse:
    """Return a page that asks whether to act: yes repeats the request, no leads back."""
    label, _function = ACTIONS[name]
    fields = [(key, value) for key, values in request.POST.lists() for value in values]
    context = {
        **model_admin.admin_site.each_context(request),
        "title": _("Are you sure?"),
        "label": label,
        "jobs": jobs,
        "back": back,
        "fields": [(key, value) for key, value in fields if key != "csrfmiddlewaretoken"],
    }
    return TemplateResponse(request, "admin/pgdefer/job/confirm.html", context)


def _without_succeeded(model_admin: Any, request: HttpRequest, jobs: list[Job]) -> list[Job]:
    """Return the jobs to retry: those that have succeeded would do their work again."""
    kept = [job for job in jobs if job.state != "succeeded"]
    if skipped := len(jobs) - len(kept):
        text = f"Skipped, as they have succeeded: {skipped}."
        model_admin.message_user(request, text, messages.WARNING)
    return kept


class JobForm(forms.ModelForm):  # type: ignore[type-arg]
    """Edits the args as the database prints them: Python would round their numbers."""

    args = forms.CharField(widget=forms.Textarea)

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if "args" in self.fields:
            printed = Func("args", function="jsonb_pretty", output_field=TextField())
            found = Job.objects.filter(pk=self.instance.pk).values_list(printed, flat=True)
            self.initial["args"] = found.first()

    def clean_args(self) -> str:
        """Refuse what is no JSON here, so that it can be corrected."""
        text: str = self.cleaned_data["args"]
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            raise ValidationError(f"This is no JSON: {error}") from error
        except (RecursionError, ValueError):
            pass  # which the database may be able to read
        return text


class JobAdmin(HidingAdmin):
    """Jobs: users who may view them see why they are not running; users who may change them act."""

    form = JobForm
    change_form_template = "admin/pgdefer/job/change_form.html"
    change_list_template = "admin/pgdefer/job/change_list.html"
    list_display = (
        "id",
        "task",
        "queue",
        "state",
        "reason",
        "priority",
        "attempts",
        "created_at",
        "scheduled_at",
        "lock",
        "headline",
    )
    list_display_links = ("id", "task")
    list_filter = (StateFilter, QueueFilter, TaskFilter)
    list_per_page = 50
    search_fields = ("id",)
    search_help_text = "An id; a text of the args or description; $.a ? (@ > 1); key:lock"
    show_facets = ShowFacets.NEVER
    show_full_result_count = False
    sortable_by = ()
    ordering = ("-id",)
    actions = tuple(_action(name) for name in ACTIONS)
    fieldsets = (
        (None, {"fields": ("task", "queue", "state", "why", "args", "result", "error")}),
        (
            "How it goes",
            {"fields": ("attempts", "crashes", "progress", "worker_id", "history_of_attempts")},
        ),
        ("When", {"fields": ("created_at", "scheduled_at", "started_at", "finished_at")}),
        (
            "What holds it",
            {"fields": ("priority", "deadline", "expires_at", "lock", "queueing_lock")},
        ),
        ("Beside others", {"fields": ("concurrency_key", "needs", "parent_id")}),
        ("Other options", {"fields": ("options", "headers")}),
    )

    # Permissions

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Nobody defers jobs here."""
        del request
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Disable Django's own way of deleting rows: an action deletes jobs."""
        del request, obj
        return False

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may act on jobs."""
        return may(request, Job, "change")

    def has_erase_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may delete jobs."""
        return may(request, Job, "delete")

    # Pages

    def get_changelist(self, request: HttpRequest, **_options: Any) -> type[ChangeList]:
        """Return the list that searches."""
        del request
        return JobChangeList

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Let the args be edited while the database allows that."""
        every = [name for _, options in self.fieldsets for name in options["fields"]]
        if may(request, Job, "change") and obj and obj.state not in ("running", "succeeded"):
            every.remove("args")
        return every

    @admin.display(description="error")
    def headline(self, job: Job) -> str:
        """Return the first line of the error."""
        return first_line(job.error or "")[:100]

    def why(self, job: Job) -> str:
        """Return the reason why it is not running."""
        try:
            return project_app().job(job.id).why()
        except PgDeferError as error:
            return str(error)

    @admin.display(description="attempts that did not succeed")
    def history_of_attempts(self, job: Job) -> str:
        """Return the attempts as a table, with the tracebacks."""
        rows = (
            (
                one.attempt,
                one.outcome,
                one.finished_at,
                one.detail("traceback") or one.error or "",
            )
            for one in job.history.order_by("-claim")[:20]
        )
        return format_html(
            "<table>{}</table>",
            format_html_join(
                "", "<tr><td>{}</td><td>{}</td><td>{}</td><td><pre>{}</pre></td></tr>", rows
            ),
        )

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show a job, with the actions that its state allows."""
        job = self.get_object(request, object_id)
        offered = [
            (name, label)
            for name, (label, _function) in ACTIONS.items()
            if job is not None and job.state in OFFERED[name] and self._may_do(request, name)
        ]
        context = {**(extra_context or {}), "job_actions": offered}
        return super().change_view(request, object_id, form_url, context)

    def _may_do(self, request: HttpRequest, name: str) -> bool:
        is_delete = name == "delete"
        return self.has_erase_permission(request) if is_delete else may(request, Job, "change")

    def get_urls(self) -> list[Any]:
        """Add the URL to which a job's page sends its actions."""
        view = self.admin_site.admin_view(self.act_view)
        return [
            path("<int:id>/act/<str:name>/", view, name="pgdefer_job_act"),
            *super().get_urls(),
        ]

    def act_view(self, request: HttpRequest, id: int, name: str) -> HttpResponse:
        """Act on one job."""
        if name not in ACTIONS or request.method != "POST":
            raise Http404
        if not self._may_do(request, name):
            raise PermissionDenied
        page = reverse("admin:pgdefer_job_change", args=[id])
        if _must_ask(request, name) and (job := self.get_object(request, str(id))) is not None:
            return _question(self, request, name, [job], page)
        refused = act(lambda: ACTIONS[name][1](id))
        if refused is None:
            self.message_user(request, f"Job {id}: {name}", messages.SUCCESS)
        else:
            self.message_user(request, refused, messages.ERROR)
        if name == "delete" and refused is None:
            return HttpResponseRedirect(reverse("admin:pgdefer_job_changelist"))
        return HttpResponseRedirect(page)

    # Changing the args

    def save_model(self, request: HttpRequest, obj: Job, form: Any, change: bool) -> None:
        """Replace the job's args by the edited ones."""
        del change
        if "args" not in form.changed_data:
            return
        parameters = {"id": obj.id, "args": form.cleaned_data["args"]}
        refused = act(lambda: project_app().client.call(sql.SET_ARGS, parameters))
        request.META["pgdefer.refused"] = refused or ""

    def response_change(self, request: HttpRequest, obj: Job) -> HttpResponse:
        """Show an error if the args were refused."""
        if refused := request.META.get("pgdefer.refused"):
            self.message_user(request, refused, messages.ERROR)
            return HttpResponseRedirect(reverse("admin:pgdefer_job_change", args=[obj.id]))
        return super().response_change(request, obj)
