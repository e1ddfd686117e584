"""The project's settings: the dict `PGDEFER`. All keys are optional.

Tests: contrib/test_django.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from django.conf import settings as project
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS

from pgdefer.database.install import Form

__all__ = ["Settings", "read"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The values of `PGDEFER`.

    `DATABASE` is the alias of the queue's database. `PGBOUNCER` is True if that connection goes
    through pgbouncer; `LISTEN_DATABASE` is then the alias of a direct connection to the same
    database, on which workers listen for notifications. `IMPORTS` are modules with tasks, in
    addition to each app's `tasks`. `DEFAULTS` are options of every task, `MIDDLEWARE` names
    functions that surround every handler, `DEFER_MIDDLEWARE` those that surround every call that
    defers, `HEADERS` one that returns a job's headers. `FORM` is how migrations install the queue.
    """

    DATABASE: str = "default"
    LISTEN_DATABASE: str | None = None
    PGBOUNCER: bool = False
    IMPORTS: Sequence[str] = ()
    DEFAULTS: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    MIDDLEWARE: Sequence[str] = ()
    DEFER_MIDDLEWARE: Sequence[str] = ()
    HEADERS: str | None = None
    FORM: str = "auto"

    @property
    def migrate_command(self) -> str:
        """The command that installs the queue; in another database it migrates nothing else."""
        if self.DATABASE == DEFAULT_DB_ALIAS:
            return "manage.py migrate"
        return f"manage.py migrate pgdefer --database {self.DATABASE}"


def read() -> Settings:
    """Return the present settings. Raises ImproperlyConfigured for unknown keys, wrong types."""
    given = getattr(project, "PGDEFER", {})
    known = {field.name for field in dataclasses.fields(Settings)}
    if not isinstance(given, Mapping):
        raise ImproperlyConfigured(f"PGDEFER must be a dict, not {given!r}")
    if unknown := sorted(map(str, given.keys() - known)):
        raise ImproperlyConfigured(
            f"PGDEFER has no key {', '.join(unknown)}: it has {', '.join(sorted(known))}"
        )
    settings = Settings(**given)
    for keys, is_fit, wanted in _RULES:
        for key in keys:
            if not is_fit(value := getattr(settings, key)):
                raise ImproperlyConfigured(f"PGDEFER[{key!r}] must be {wanted}, not {value!r}")
    return settings


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


_FORMS = get_args(Form)
_RULES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("DATABASE",), lambda value: isinstance(value, str), "a name"),
    (
        ("LISTEN_DATABASE", "HEADERS"),
        lambda value: value is None or isinstance(value, str),
        "a name or None",
    ),
    (("PGBOUNCER",), lambda value: isinstance(value, bool), "True or False"),
    (("IMPORTS", "MIDDLEWARE", "DEFER_MIDDLEWARE"), _is_list, "a list of names"),
    (("DEFAULTS",), lambda value: isinstance(value, Mapping), "a dict"),
    (("FORM",), lambda value: value in _FORMS, f"one of {', '.join(_FORMS)}"),
)
