"""Codecs of Django's types: model instances are stored by their keys, lazy values as their values.

Tests: contrib/test_django_handlers.py, contrib/test_django_rows.py.
"""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.db import connections, models, router
from django.utils.functional import LazyObject, Promise, empty
from django.utils.safestring import SafeString

from pgdefer.codec import Codec
from pgdefer.contrib.django.connections import leftover_state, renew_connections
from pgdefer.errors import DecodeError, EncodeError
from pgdefer.tasks.context import running_job

__all__ = ["register_types"]


def register_types(codec: Codec) -> None:
    """Register instances of models, lazy strings and safe strings with a codec."""
    codec.register(models.Model, "django_row", _encode_row, _decode_row, blocking=True)
    codec.register(Promise, "django_lazy", _encode_text, _as_it_is)
    codec.register(LazyObject, "django_lazy_object", _unwrapped, _as_it_is)
    codec.register(SafeString, "django_safe", _encode_text, SafeString)


def _encode_row(row: models.Model) -> dict[str, Any]:
    if row.pk is None or row._state.adding:
        raise EncodeError(f"{row._meta.label} has not been saved yet: {row!r}")
    # The database to which the row is written, unless the router finds that without the row. So a
    # row that was read from a replica is stored as one of the primary.
    alias = router.db_for_write(type(row), instance=row)
    return {"model": row._meta.label_lower, "pk": row.pk} | (
        {} if alias == router.db_for_write(type(row)) else {"database": alias}
    )


def _decode_row(value: dict[str, Any]) -> models.Model:
    try:
        model = apps.get_model(value["model"])
    except LookupError as error:
        raise DecodeError(f"there is no model {value['model']}: {error}") from error
    # From the database to which it is written: a replica may not have it yet.
    alias = value.get("database") or router.db_for_write(model)
    connection = connections[alias]
    was_open = connection.connection is not None
    is_in_job = running_job() is not None  # elsewhere the connection is the caller's
    if was_open and is_in_job:
        renew_connections()
    may_end = is_in_job and (not was_open or not leftover_state(connection))
    try:
        row: models.Model = model._base_manager.using(alias).get(pk=value["pk"])
    except model.DoesNotExist as error:
        raise DecodeError(f"the row {model._meta.label} {value['pk']!r} has gone") from error
    else:
        return row
    finally:
        if may_end and connection.connection and not connection.get_autocommit():
            connection.rollback()  # of nothing but what has been read here
        if not was_open and not connection.in_atomic_block:
            connection.close_if_unusable_or_obsolete()


def _encode_text(text: object) -> str:
    return "".join([*str(text)])


def _unwrapped(value: Any) -> Any:
    """Return what a lazy object stands for, such as the user of a request."""
    if value._wrapped is empty:
        value._setup()
    return value._wrapped


def _as_it_is(value: Any) -> Any:
    return value
