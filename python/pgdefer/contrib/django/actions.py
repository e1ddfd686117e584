"""The common part of the admin: lists, permissions, hidden args, and a message for each refusal.

Tests: contrib/test_django_admin.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import psycopg
from django.contrib import admin, messages
from django.contrib.admin.views.main import ChangeList
from django.contrib.auth import get_permission_codename
from django.core.exceptions import BadRequest, PermissionDenied
from django.db import DataError, Error, connections, transaction
from django.http import HttpRequest, HttpResponse

from pgdefer.contrib.django import conf
from pgdefer.database import sql
from pgdefer.database.callers import rows_on_django
from pgdefer.errors import PgDeferError, sqlstate_of

__all__ = ["HidingAdmin", "UncountedList", "act", "act_on_each", "hiding", "may", "permitted"]

SEES_SENSITIVE = "pgdefer.view_sensitive_args"


class UncountedList(ChangeList):
    """A list of rows that were read without counting all there are."""

    def show(self, request: HttpRequest, rows: Any, per_page: int) -> None:
        """Set what Django's templates read, as `get_results` must."""
        self.result_list = rows
        self.result_count = len(rows)
        # The same: templates then show neither, nor a link to all.
        self.full_result_count = len(rows)
        self.show_full_result_count = False
        self.show_admin_actions = True
        self.can_show_all = self.multi_page = False
        self.paginator = self.model_admin.get_paginator(request, rows, per_page)


def may(request: HttpRequest, model: Any, what: str) -> bool:
    """Return whether the user has Django's permission: view, change or delete."""
    name = get_permission_codename(what, model._meta)
    return bool(request.user.has_perm(f"{model._meta.app_label}.{name}"))


@contextlib.contextmanager
def hiding(request: HttpRequest) -> Iterator[None]:
    """Make the database hide sensitive args in a block, unless the user has the permission.

    Django may connect as the queue's owner, who sees them.
    """
    if request.user.has_perm(SEES_SENSITIVE):
        yield
        return
    alias = conf.read().DATABASE
    with transaction.atomic(using=alias):
        connection = connections[alias]
        ((before, _),) = rows_on_django(connection, sql.HIDE_SENSITIVE, {"hide": "on"})
        yield
        # The request, or the test, may go on in this transaction.
        rows_on_django(connection, sql.HIDE_SENSITIVE, {"hide": before})


class HidingAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """A page of one row, which hides sensitive args."""

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Any:
        """Return a row; the database can't even be asked for one whose key contains NUL."""
        return None if "\0" in object_id else super().get_object(request, object_id, from_field)

    def response_action(self, request: HttpRequest, *given: Any, **named: Any) -> Any:
        """Act on rows, unless the form names one by what is no key, or asks for all.

        No list offers that: it shows a part, and all would be more than its filters let through.
        """
        if request.POST.get("select_across", "0") != "0":
            raise BadRequest("Actions are for selected rows, not for all")
        try:
            return super().response_action(request, *given, **named)
        except (ValueError, DataError) as error:  # an action shows its own errors
            raise BadRequest(f"This selection can't be read: {error}") from error

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show a row, or save its changes."""
        with hiding(request):
            found: HttpResponse = super().changeform_view(
                request, object_id, form_url, extra_context
            )
            return found


def act(action: Callable[[], object]) -> str | None:
    """Make a call, in a savepoint if there is a transaction; return the error if it was refused."""
    alias = conf.read().DATABASE
    is_within = connections[alias].in_atomic_block
    try:
        with transaction.atomic(using=alias) if is_within else contextlib.nullcontext():
            action()
    except (Error, PgDeferError, ValueError) as error:
        return str(error).partition("\nCONTEXT:")[0]
    return None


@contextlib.contextmanager
def permitted() -> Iterator[None]:
    """Deny a page that reads what the database does not let its role read."""
    try:
        yield
    except Error as error:
        if sqlstate_of(error) == psycopg.errors.InsufficientPrivilege.sqlstate:
            raise PermissionDenied from error
        raise


def act_on_each(
    model_admin: Any, request: HttpRequest, rows: Iterable[Any], action: Callable[[Any], object]
) -> None:
    """Act on each row, and show which ones were refused."""
    done = 0
    for row in rows:
        refused = act(lambda row=row: action(row))  # type: ignore[misc]
        if refused is None:
            done += 1
        else:
            model_admin.message_user(request, f"{row}: {refused}", messages.ERROR)
    if done:
        model_admin.message_user(request, f"Done: {done}.", messages.SUCCESS)
