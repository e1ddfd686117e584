"""The known steps of a run, and the checks of names and values: the part without the database.

Tests: integration/test_durable.py, integration/test_durable_children_read.py.
"""

from __future__ import annotations

import contextlib
import json
import numbers
import re
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from decimal import Decimal
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar

from pgdefer.checks import check_number
from pgdefer.codec import STEP_FAILED, TAG, is_storable, parsed, unwrap
from pgdefer.errors import (
    DecodeError,
    InvalidParameter,
    JobCancelled,
    JobFailed,
    TransactionLost,
)
from pgdefer.tasks.running_steps import RunningSteps

__all__ = [
    "LOST",
    "AsyncStepCall",
    "AsyncStepDecorator",
    "AsyncStepFunction",
    "StepCall",
    "StepDecorator",
    "StepFunction",
    "Steps",
    "TakeSteps",
    "check_is_decorator",
    "check_name",
    "check_stored_name",
    "failure_of",
    "ids_of",
    "losses_translated",
    "name_of_step",
    "results_of",
    "step_json",
]

# The largest lazy step that is kept, and roughly the size of all, in characters.
MAX_KEPT = 2_000
MAX_ALL_KEPT = 200_000

LOST = "the connection was lost in a step of the job"

# The longest name, in bytes.
MAX_NAME = 1_000

P = ParamSpec("P")
R = TypeVar("R")

StepFunction: TypeAlias = Callable[P, R]
AsyncStepFunction: TypeAlias = Callable[P, Coroutine[Any, Any, R]]
StepCall: TypeAlias = Callable[..., R]
AsyncStepCall: TypeAlias = Callable[..., Awaitable[R]]
TakeSteps: TypeAlias = Callable[..., str]
# A row of queue.needs: a child's id, task, state, result and last error.
Child: TypeAlias = Sequence[Any]


class StepDecorator(Protocol):
    """The decorator `job.step("name")`."""

    def __call__(self, function: StepFunction[P, R], /) -> StepFunction[P, R]:
        """Make each call of the function a step."""


class AsyncStepDecorator(Protocol):
    """The decorator `job.step_async("name")`."""

    def __call__(self, function: AsyncStepFunction[P, R], /) -> AsyncStepFunction[P, R]:
        """Make each call of the coroutine function a step."""


class Steps:
    """The finished steps that came with a claim, and how often the run has used each name.

    The second use of a name is `name#2`. This is the database's rule (queue.begin_step); the client
    applies it too, because it does not ask about steps that it knows. Numbers that the handler
    itself has given in a name are skipped. Lazy steps are kept here until the next call that stores
    steps, or the run's outcome.
    """

    __slots__ = (
        "_children",
        "_finished",
        "_stored",
        "_taken",
        "_uses",
        "ended_as",
        "kept",
        "running",
    )

    def __init__(self, stored: str | None) -> None:
        self._stored = stored
        self._finished: dict[str, Any] | None = {} if stored is None else None
        self._uses: dict[str, int] = {}
        self._taken: set[str] = set()  # the steps of this run
        self._children: dict[int, Child] = {}  # as last read; those that had ended do not change
        #: Once a step, sleep or wait has ended the claim: the outcome, as queue.attempts calls it,
        #: and the job's state afterwards.
        self.ended_as: tuple[str, str] | None = None
        self.running = RunningSteps()
        #: The lazy steps that are not stored yet, in JSON.
        self.kept: list[str] = []

    @property
    def finished(self) -> dict[str, Any] | None:
        """The stored values by name; None if they did not fit into the answer of queue.fetch."""
        if self._finished is None and self._stored is not None:
            self._finished = unwrap(self._stored) or None
            self._stored = None
        return self._finished

    def suspended(self, outcome: str, state: str) -> None:
        """Record that a sleep or wait has ended the claim, with this outcome in queue.attempts.

        `state` is the job's state now, unless the outcome is `aborted`.
        """
        self.ended_as = (outcome, "cancelled" if outcome == "aborted" else state)

    def complete(self, rows: Iterable[Sequence[Any]]) -> None:
        """Store all finished steps, which were read separately."""
        self._finished = {name: None if value is None else parsed(value) for name, value in rows}

    def take(self, name: str, fingerprint: str | None = None) -> str:
        """Return the name of a step that begins, with its number.

        Raises TypeError or InvalidParameter for a name or fingerprint that can't be stored.
        """
        check_name("name", name)
        if fingerprint is not None:
            check_stored_name("fingerprint", fingerprint)
        uses = self._uses.get(name, 0) + 1
        while (key := _numbered(name, uses)) in self._taken:
            uses += 1
        self._uses[name] = uses
        self._taken.add(key)
        return key

    def give_back(self, name: str, key: str) -> None:
        """Record that a step has not finished: the next use of its name is the same step.

        If steps of one name run at once, a later use may have begun: it keeps its number.
        """
        uses = self._uses[name]
        if key == _numbered(name, uses):
            self._uses[name] = uses - 1
            self._taken.discard(key)

    def keep(self, step: str) -> bool:
        """Keep a lazy step; return whether there was room."""
        if len(step) > MAX_KEPT or len(self.kept) * MAX_KEPT >= MAX_ALL_KEPT:
            return False
        self.kept.append(step)
        return True

    def take_kept(self) -> list[str]:
        """Return the lazy steps to store now."""
        kept, self.kept = self.kept, []
        return kept

    def read_children(self, ids: Iterable[int], rows: Iterable[Child]) -> None:
        """Record the children as read. Those of `ids` that have no row are gone.

        A child that had ended when read stays so in this run, even if an operator retries it.
        """
        found = {id: (id, None, *_GONE) for id in ids} | {row[0]: row for row in rows}
        self._children = found | {id: row for id, row in self._children.items() if _has_ended(row)}

    def ended_children(self, ids: Iterable[int]) -> list[Child] | None:
        """Return the rows of these children, or None unless all are known to have ended."""
        found = [self._children.get(id) for id in ids]
        ended = [row for row in found if row is not None and _has_ended(row)]
        return ended if len(ended) == len(found) else None

    @contextlib.contextmanager
    def storing(self) -> Iterator[TakeSteps]:
        """Yield a function that returns the JSON of the lazy steps and those passed to it.

        The lazy ones are kept again if the block fails: put it around the transaction.
        """
        taken: list[str] = []

        def take(*last: str) -> str:
            taken.extend(self.take_kept())
            return f"[{','.join([*taken, *last])}]"

        try:
            yield take
        except BaseException:
            self.kept[:0] = taken
            raise

    @contextlib.asynccontextmanager
    async def storing_async(self) -> AsyncIterator[TakeSteps]:
        """As `storing`."""
        with self.storing() as take:
            yield take


@contextlib.contextmanager
def losses_translated(is_loss: Callable[[Exception], bool]) -> Iterator[None]:
    """Raise TransactionLost for a loss of the connection, which is no failure of the job."""
    try:
        yield
    except Exception as error:
        if is_loss(error):
            raise TransactionLost(LOST) from error
        raise


def _numbered(name: str, uses: int) -> str:
    return name if uses == 1 else f"{name}#{uses}"


_REAL = (Decimal, numbers.Real)
# A name that has a number (queue._step_key).
_WITH_NUMBER = re.compile(r"(.+)#(?:[2-9]|[1-9][0-9]{1,8})", re.DOTALL)


def check_name(what: str, name: object) -> None:
    """Check a step's name. Its number does not count."""
    found = _WITH_NUMBER.fullmatch(name) if isinstance(name, str) and "#" in name else None
    check_stored_name(what, found[1] if found else name)


def check_stored_name(what: str, text: object) -> None:
    """Raise TypeError or InvalidParameter for a text that the database would refuse as a name.

    Lazy steps need this check: the database would refuse them later, together with other steps.
    """
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a text, not {text!r}")
    if not text:
        raise InvalidParameter(f"{what} is missing", hint="Give a name of 1 to 1,000 bytes.")
    if not is_storable(text):
        shown = ascii(text[:100])
        raise InvalidParameter(f"{what} has a character that PostgreSQL can't store", detail=shown)
    if (size := len(text.encode())) > MAX_NAME:
        hint = "Names are at most 1,000 bytes."
        raise InvalidParameter(f"{what} is too long", detail=f"{size} bytes", hint=hint)


def checked_progress(percent: Any, message: object) -> Any:
    """Return the percentage as it is stored, or None. Raises TypeError or ValueError."""
    if message is not None and not isinstance(message, str):
        raise TypeError(f"message must be text, not {message!r}")
    if message is not None and not is_storable(message):
        raise ValueError(f"message has a character that PostgreSQL can't store: {message!a}")
    if percent is None:
        return None
    rounded = percent
    if not isinstance(percent, bool) and isinstance(percent, _REAL):
        with contextlib.suppress(OverflowError):
            rounded = round(float(percent), 2)
    check_number("percent", rounded, _REAL, at_least=0, at_most=100)
    return rounded


def step_json(key: str, value: str | None, fingerprint: str | None) -> str:
    """Return a finished step as queue.finish_steps takes it; `value` is JSON, or None for null."""
    head = f'{{"name":{json.dumps(key, ensure_ascii=False)}'
    if fingerprint is not None:
        head += f',"fingerprint":{json.dumps(fingerprint, ensure_ascii=False)}'
    return f'{head},"value":{"null" if value is None else value}}}'


def name_of_step(step: object) -> str:
    """Return a step's name: the text itself, or a decorated function's name. Raises TypeError."""
    if isinstance(step, str):
        return step
    name = getattr(step, "__name__", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise TypeError(f"{step!r} has no name: pass the step's name as a text")
    return name


def check_function(function: object) -> None:
    """Raise TypeError if a step can't call this."""
    if not callable(function):
        raise TypeError(f'a step calls a function, not {function!r}: step("name", function, ...)')


def check_is_decorator(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError if there are arguments for a function, but no function was passed."""
    if args or kwargs:
        raise TypeError('pass the function after the name: step("name", function, ...)')


def failure_of(stored: Any) -> str | None:
    """Return the error of a step that has failed for good, from its stored value; else None."""
    if isinstance(stored, dict) and stored.get(TAG) == STEP_FAILED:
        return str(stored.get("value"))
    return None


# A child that was removed by retention, or by an operator: its state, result and error.
_GONE = ("deleted", None, "it is gone, and its result with it")
# The states of a child that has ended; None: this role may not use its queue.
_ENDED = ("succeeded", "failed", "cancelled", "deleted", None)


def _has_ended(row: Child) -> bool:
    return row[2] in _ENDED


def results_of(
    rows: Iterable[tuple[int, str, Any, str | None]], *, return_errors: bool
) -> list[Any]:
    """Return the results of children that have ended, in the order of their rows.

    Raises JobFailed or JobCancelled for the first that has not succeeded; with `return_errors` the
    list contains these errors. A child that no longer exists has failed.
    """
    found: list[Any] = []
    for id, state, result, said in rows:
        why = _GONE[2] if state == "deleted" else said
        if state != "succeeded":
            cancelled = state == "cancelled"
            error = JobCancelled(id, why) if cancelled else JobFailed(id, why, state)
            if not return_errors:
                raise error
            found.append(error)
        else:
            found.append(result)
    return found


def ids_of(name: str, value: Any, count: int | None) -> list[int]:
    """Return the ids that are a step's value. Raises DecodeError if it is no list of `count` ids.

    `count` None means any number.
    """
    if (
        not isinstance(value, list)
        or not all(type(id) is int for id in value)
        or (count is not None and len(value) != count)
    ):
        raise DecodeError(
            f"the step {name!r} was another one when it finished: give this one another name"
        )
    return value
