"""Binds a job's args to the parameters of its handler.

Tests: unit/test_task.py, unit/test_recurring.py.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pgdefer.codec import TAG, VERSION
from pgdefer.errors import DecodeError
from pgdefer.options import DeferOptions

__all__ = ["SCHEDULED_FOR", "Parameters"]

# The key that a recurring run adds to its schedule's args: the time of the run, as text.
SCHEDULED_FOR = "scheduled_for"
# The options that `configure` takes, and `defer` does not.
OPTIONS = frozenset({*DeferOptions.__annotations__, "connection"})


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The parameters of a handler. A job's args are an object with their names as keys."""

    signature: inspect.Signature
    allowed: frozenset[str]
    required: frozenset[str]
    positional: tuple[str, ...]
    rest: str | None
    keywords: str | None
    wants_moment: bool
    version: int = 1

    @classmethod
    def of(
        cls, function: Callable[..., Any], *, has_connection: bool = False, version: int = 1
    ) -> Parameters:
        """Return the parameters of a function. Raises TypeError if it can't be a handler.

        With `has_connection`, the first parameter is not an argument of the job.
        """
        signature = inspect.signature(function)
        if _is_method(function, signature):
            raise TypeError("it is a method, and a worker has no object for it: make it a function")
        if has_connection:
            if not signature.parameters:
                raise TypeError("it is transactional: its first parameter must be the connection")
            _, *others = signature.parameters.values()
            signature = signature.replace(parameters=others)
        parameters = signature.parameters.values()
        by_kind: dict[Any, list[str]] = collections.defaultdict(list)
        for p in parameters:
            by_kind[p.kind].append(p.name)
        rest = by_kind[inspect.Parameter.VAR_POSITIONAL]
        keywords = by_kind[inspect.Parameter.VAR_KEYWORD]
        named = [p for p in parameters if p.name not in (*rest, *keywords)]
        if reserved := [p.name for p in parameters if p.name in (TAG, VERSION)]:
            raise TypeError(f"a parameter can't be named {reserved[0]}")
        positional = by_kind[inspect.Parameter.POSITIONAL_ONLY]
        if rest:
            positional += by_kind[inspect.Parameter.POSITIONAL_OR_KEYWORD]
        return cls(
            signature=signature,
            allowed=frozenset([*(p.name for p in named), *rest]),
            required=frozenset(p.name for p in named if p.default is p.empty),
            positional=tuple(positional),
            rest=rest[0] if rest else None,
            keywords=keywords[0] if keywords else None,
            wants_moment=_is_moment(function, signature),
            version=version,
        )

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of a call by name, with their version if it is not 1.

        Raises TypeError as the call itself would.
        """
        bound = self._bind(args, kwargs)
        return bound if self.version == 1 else {**bound, VERSION: self.version}

    def bind_run(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a schedule's runs. Raises TypeError as the call itself would."""
        if SCHEDULED_FOR in args:
            raise TypeError(f"{SCHEDULED_FOR} is the run's own")
        named = dict(args)
        if SCHEDULED_FOR in self.required:
            named[SCHEDULED_FOR] = None
        bound = dict(self.bind((), named))
        bound.pop(SCHEDULED_FOR, None)
        return bound

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        is_simple = not (args or self.positional or self.rest or self.keywords)
        if is_simple and self.required <= kwargs.keys() <= self.allowed:
            return kwargs
        try:
            bound = self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            unknown = sorted(kwargs.keys() - self.allowed)
            if options := [name for name in unknown if name in OPTIONS]:
                raise TypeError(
                    f"{error}; pass options of the job to configure: "
                    f"task.configure({options[0]}=...).defer(...)"
                ) from None
            if unknown and self.keywords is None:
                # A misspelt name: `signature.bind` would complain of the argument that is missing.
                raise TypeError(f"got an unexpected keyword argument {unknown[0]!r}") from None
            raise
        if self.rest is not None and self.rest in bound:
            bound[self.rest] = list(bound[self.rest])
        if self.keywords is not None:
            more = bound.pop(self.keywords, {})
            if clash := sorted(more.keys() & self.allowed):
                raise TypeError(f"{', '.join(clash)} would be passed twice")
            bound.update(more)
        return bound

    def unbind(self, args: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and keyword arguments of the call for a job's args.

        Raises DecodeError if they do not fit the signature.
        """
        if SCHEDULED_FOR in args:
            args = self._take_moment(args)
        if not (args.keys() <= self.allowed) and self.keywords is None:
            unknown = ", ".join(sorted(args.keys() - self.allowed))
            raise DecodeError(f"the task takes no argument {unknown}")
        if not args.keys() >= self.required:
            missing = ", ".join(sorted(self.required - args.keys()))
            raise DecodeError(f"the task needs the argument {missing}")
        if not self.positional and self.rest is None:
            return [], args
        kwargs = dict(args)
        more = kwargs.pop(self.rest, []) if self.rest is not None else []
        if not isinstance(more, list):
            raise DecodeError(f"the argument {self.rest} must be a list")
        positional: list[Any] = []
        for name in self.positional:
            if name in kwargs:
                positional.append(kwargs.pop(name))
            elif more or any(later in kwargs for later in self.positional):
                # A gap: without a value, later arguments would move up.
                positional.append(self.signature.parameters[name].default)
        return [*positional, *more], kwargs

    def _take_moment(self, args: dict[str, Any]) -> dict[str, Any]:
        """Convert a run's time to its declared type, or remove it if there is no such parameter."""
        moment = args[SCHEDULED_FOR]
        if SCHEDULED_FOR not in self.allowed:
            return {name: value for name, value in args.items() if name != SCHEDULED_FOR}
        if self.wants_moment and isinstance(moment, str):
            try:
                return args | {SCHEDULED_FOR: dt.datetime.fromisoformat(moment)}
            except ValueError:
                raise DecodeError(f"{SCHEDULED_FOR} is not a time: {moment!r}") from None
        return args


def _is_method(function: Callable[..., Any], signature: inspect.Signature) -> bool:
    """Whether the function was defined in a class body, and takes `self`."""
    _, _, name = getattr(function, "__qualname__", "").rpartition("<locals>.")
    return "." in name and next(iter(signature.parameters), None) == "self"


def _is_moment(function: Callable[..., Any], signature: inspect.Signature) -> bool:
    """Whether the function declares `scheduled_for` as a datetime."""
    if SCHEDULED_FOR not in signature.parameters:
        return False
    try:
        hint = typing.get_type_hints(function).get(SCHEDULED_FOR)
    except (NameError, TypeError):
        # Names that only a type checker knows.
        hint = signature.parameters[SCHEDULED_FOR].annotation
        return isinstance(hint, str) and "datetime" in hint
    return dt.datetime in (hint, *typing.get_args(hint))
