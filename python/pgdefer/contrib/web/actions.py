"""The actions of visitors: each is a call of one public function, as their role.

Tests: contrib/test_web.py, browser/test_actions.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

from pgdefer.options import ENDED, STATES

from . import queries
from .database import Refused, Unreachable
from .matches import filters_of, find, used_filters
from .pool import Full
from .visit import BadRequest, Form, NotFound, Visit

__all__ = ["ACTIONS", "JOB_ACTIONS", "MANY_ACTIONS", "JobAction", "is_possible"]

MOST = 1_000  # ids in a call, as the functions take
SLICE = 500  # jobs in one slice of a call on all that match
ONLY = "only_"  # distinguishes the filters in a form from the fields of its call
# The SQLSTATEs that functions on many jobs report in their rows, in words.
REFUSALS = {
    "QJ001": "job not found",
    "QJ003": "the job's state does not allow this",
    "QJ004": "another job has its queueing lock",
    "QJ009": "the job has finished no such step: its page lists them",
}


@dataclasses.dataclass(frozen=True)
class Field:
    """A field that a call needs in addition to the job."""

    name: str
    label: str
    kind: str = "text"  # text, number, flag, json, moment
    required: bool = False

    def value(self, form: Form) -> Any:
        """Return the value that was entered."""
        if self.kind == "flag":
            return form.flag(self.name)
        value = form.maybe(self.name)
        if value is None and self.required:
            raise Refused("22023", f"{self.label} is missing")
        if self.kind == "json" and value is not None:
            try:
                json.loads(value, parse_int=str)  # of any length
            except RecursionError:
                raise Refused("22023", f"{self.label} is nested too deeply") from None
            except ValueError as error:
                raise Refused("22023", f"{self.label} is not JSON: {error}") from None
        return value


@dataclasses.dataclass(frozen=True)
class JobAction:
    """A call on jobs."""

    function: str
    label: str
    statement: str
    fields: tuple[Field, ...] = ()
    loses: bool = False

    @property
    def takes_many(self) -> bool:
        """Whether one call takes many ids."""
        return "%(ids)s" in self.statement

    def values(self, form: Form) -> dict[str, Any]:
        """Return the values of its fields."""
        return {field.name: field.value(form) for field in self.fields}


def one(call: str, label: str, *fields: Field, loses: bool = False) -> JobAction:
    """Return a call on one job, whose state it returns."""
    function = call.partition("(")[0]
    return JobAction(function, label, f"select queue.{call} as outcome", fields, loses)


def many(call: str, label: str, *fields: Field, loses: bool = False) -> JobAction:
    """Return a call on many jobs, which returns a row for each."""
    function = call.partition("(")[0]
    statement = f"select id, outcome, error from queue.{call}"  # noqa: S608 (the calls below)
    return JobAction(function, label, statement, fields, loses)


FORCE = Field("force", "also if it runs: its claim is lost", "flag")
_ALL = [
    many(
        "retry(%(ids)s::bigint[], %(force)s, %(from_step)s)",
        "Retry",
        FORCE,
        Field("from_step", "from its step (empty: where it stopped)"),
    ),
    one(
        "signal(%(id)s, %(name)s, %(payload)s::jsonb)",
        "Send a signal",
        Field("name", "signal", required=True),
        Field("payload", "payload (JSON; empty: {})", "json"),
    ),
    one("hold(%(id)s)", "Hold"),
    one("unhold(%(id)s)", "Unhold"),
    one(
        "cancel(%(id)s, %(abort)s)",
        "Cancel",
        Field("abort", "also if it runs: its worker is told", "flag"),
        loses=True,
    ),
    one(
        "reschedule(%(id)s, %(at)s::timestamptz)",
        "Reschedule",
        Field("at", "at (UTC; empty: now)", "moment"),
    ),
    many(
        "set_priority(%(ids)s::bigint[], %(priority)s::integer)",
        "Set the priority",
        Field("priority", "priority", "number", required=True),
    ),
    many(
        "set_deadline(%(ids)s::bigint[], %(at)s::timestamptz)",
        "Set the deadline",
        Field("at", "at (UTC; empty: none)", "moment"),
    ),
    many(
        "move(%(ids)s::bigint[], %(queue)s, %(force)s)",
        "Move",
        Field("queue", "queue", required=True),
        FORCE,
    ),
    one("copy(%(id)s, %(queue)s)", "Copy", Field("queue", "queue (empty: the same)")),
    one("fork(%(id)s, %(step)s)", "Fork", Field("step", "from its step", required=True)),
    one(
        "set_args(%(id)s, %(args)s::jsonb)",
        "Edit args",
        Field("args", "args", "json", required=True),
    ),
    many("done(%(ids)s::bigint[])", "Mark as succeeded", loses=True),
    many(
        "fail_jobs(%(ids)s::bigint[], %(message)s)",
        "Fail",
        Field("message", "message"),
        loses=True,
    ),
    many("delete(%(ids)s::bigint[], %(force)s)", "Delete", FORCE, loses=True),
]
JOB_ACTIONS = {action.function: action for action in _ALL}
MANY_ACTIONS = {
    name: action
    for name, action in JOB_ACTIONS.items()
    if name not in ("copy", "fork", "set_args", "signal")
}

_UNFINISHED = frozenset(STATES) - frozenset(ENDED)
_WAITING = _UNFINISHED - {"running"}
# The states in which a call can succeed and change the job; those of the others are all.
_ALLOWED = {
    "hold": _WAITING - {"held"},
    "unhold": {"held"},
    "cancel": _UNFINISHED,
    "reschedule": _WAITING,
    "set_args": _WAITING | {"failed", "cancelled"},
    "done": frozenset(STATES) - {"succeeded"},
    "fail_jobs": _UNFINISHED,
}


def is_possible(action: JobAction, job: Mapping[str, Any], *, has_steps: bool) -> bool:
    """Whether a call on a job can succeed in the job's state."""
    state = str(job["state"])
    if action.function == "fork":
        return has_steps
    if action.function == "retry" and state in _WAITING:
        return state != "ready" and job["attempts"] > 0
    return state in _ALLOWED.get(action.function, STATES)


Outcome = tuple[int, str, str]
Trouble = Full | Refused | Unreachable | None


def run(visit: Visit, action: JobAction, ids: list[int]) -> tuple[list[Outcome], Trouble]:
    """Call a function on jobs; return the outcome of each, and why the rest was not changed."""
    done: list[Outcome] = []
    try:
        values = action.values(visit.form)
        if action.takes_many:
            with visit.session.database.visit(writes=True) as reader:
                rows = reader.rows(action.statement, ids=ids, **values)
            done += [(row["id"], row["outcome"] or "", row["error"] or "") for row in rows]
        else:
            for id in ids:
                done.append(run_one(visit, action, id, values))
    except (Full, Refused, Unreachable) as trouble:
        return done, trouble
    return done, None


def run_one(visit: Visit, action: JobAction, id: int, values: dict[str, Any]) -> Outcome:
    """Call a function on one job."""
    try:
        with visit.session.database.visit(writes=True) as reader:
            found = reader.one(action.statement, id=id, **values)
    except Refused as refused:
        if not refused.sqlstate.startswith("QJ"):
            raise
        return id, refused.detail, refused.sqlstate
    return id, str(found["outcome"]) if found else "", ""


def told(trouble: Trouble) -> str:
    """Say why a call on several jobs stopped; empty if it did not."""
    match trouble:
        case None:
            return ""
        case Refused():
            return trouble.message
        case Full():
            return "all connections to the database are in use"
        case Unreachable():
            return "the connection was lost; the audit shows whether the last call was made"


def act_on_job(visit: Visit) -> Response:
    """Act on one job."""
    id = visit.request.path_params["id"]
    action = JOB_ACTIONS.get(visit.request.path_params["action"])
    if action is None:
        raise NotFound
    outcomes, trouble = run(visit, action, [id])
    if trouble is not None:
        raise trouble
    ((_, outcome, error),) = outcomes
    if error == "QJ001":
        raise Refused(error, REFUSALS[error], f"id: {id}")
    if error:
        raise Refused(error, f"{action.label}: {REFUSALS.get(error, error)}", outcome)
    if action.function == "delete":
        return visit.go("/jobs", done=f"job {id} was deleted")
    if action.function in ("copy", "fork"):
        return visit.go(f"/jobs/{int(outcome)}", done=f"this is the copy of job {id}")
    if action.function == "signal":
        return visit.go(f"/jobs/{id}", done="the signal was sent")
    return visit.go(f"/jobs/{id}", done=f"{action.label}: {outcome}")


def act_on_jobs(visit: Visit) -> Response:
    """Show the jobs that a call would affect; make the call once it is confirmed."""
    action = MANY_ACTIONS.get(visit.form.text("action"))
    if action is None:
        raise BadRequest
    if visit.form.text("scope") == "all":
        return act_on_all(visit, action)
    ids = visit.form.numbers("ids")
    if not 0 < len(ids) <= MOST:
        raise Refused("22023", "Select at most 1,000 jobs." if ids else "No job is selected.")
    if not visit.form.flag("confirmed"):
        with visit.session.database.visit() as visit.reader:
            found = visit.read(queries.STATES_OF, ids=ids)
            return visit.page("confirm.html", action=action, ids=ids, found=found, hidden={})
    outcomes, trouble = run(visit, action, ids)
    if trouble is not None and not outcomes:
        raise trouble
    hidden = {field.name: visit.form.text(field.name) for field in action.fields}
    return visit.page(
        "done.html",
        action=action,
        outcomes=[(id, outcome, REFUSALS.get(error, error)) for id, outcome, error in outcomes],
        trouble=told(trouble),
        left=ids[len(outcomes) :] if trouble else [],
        hidden=hidden | {"action": action.function, "confirmed": "1"},
    )


def act_on_all(visit: Visit, action: JobAction) -> Response:
    """Make a call on all jobs that match, one slice at a time: each form requests the next one.

    A function that takes many ids changes a slice in one transaction; others, each job in its own.
    Stopping means that the next slice is not requested. After trouble the visitor may request it.
    """
    form = visit.form
    asked = filters_of(form, ONLY)
    hidden = {ONLY + name: value for name, value in used_filters(asked).items()}
    hidden |= {"action": action.function, "scope": "all"}
    before = form.number("before")
    if not form.flag("confirmed"):
        with visit.session.database.visit() as visit.reader:
            jobs, end = find(visit, asked, before, MOST)
            ids = [job["id"] for job in jobs]
            found = visit.read(queries.STATES_OF, ids=ids)
            return visit.page(
                "confirm.html", action=action, ids=ids, found=found, hidden=hidden, end=end
            )
    outcomes, before, trouble = act_on_slice(visit, action, asked, before)
    if trouble is not None and not outcomes and not form.flag("done"):
        raise trouble
    refused = sum(1 for _, _, error in outcomes if error)
    done = (form.number("done") or 0) + len(outcomes) - refused
    refused += form.number("refused") or 0
    hidden |= {field.name: form.text(field.name) for field in action.fields}
    hidden |= {"done": str(done), "refused": str(refused), "confirmed": "1"}
    if before is not None:
        hidden["before"] = str(before)
    return visit.page(
        "progress.html",
        action=action,
        done=done,
        refused=refused,
        hidden=hidden,
        trouble=told(trouble),
        goes_on=trouble is not None or before is not None,
    )


def act_on_slice(
    visit: Visit, action: JobAction, asked: dict[str, Any], before: int | None
) -> tuple[list[Outcome], int | None, Trouble]:
    """Make a call on the next jobs that match; return the outcomes, and where the rest begins."""
    outcomes: list[Outcome] = []
    trouble: Trouble = None
    try:
        with visit.session.database.visit() as visit.reader:
            jobs, end = find(visit, asked, before, SLICE)
        if jobs:
            outcomes, trouble = run(visit, action, [job["id"] for job in jobs])
    except (Full, Refused, Unreachable) as error:
        trouble = error
    if trouble is None:
        before = end["next_id"] if end else None
    elif outcomes:
        before = outcomes[-1][0]
    return outcomes, before, trouble


def call(visit: Visit, statement: str, **values: Any) -> None:
    """Call one function."""
    with visit.session.database.visit(writes=True) as reader:
        reader.rows(statement, **values)


def act_on_queue(visit: Visit) -> Response:
    """Pause, resume or limit queues."""
    form = visit.form
    name = form.text("queue")
    match form.text("action"):
        case "pause":
            until = form.maybe("until")
            call(visit, "select queue.pause(%(q)s, %(u)s::timestamptz)", q=name, u=until)
        case "resume":
            call(visit, "select queue.resume(%(q)s)", q=name)
        case "configure_queue":
            options = {"max_running": form.number("max_running")}
            call(
                visit,
                "select queue.configure_queue(%(q)s, %(o)s::jsonb)",
                q=name,
                o=json.dumps(options),
            )
        case _:
            raise BadRequest
    return visit.go("/queues")


def act_on_group(visit: Visit) -> Response:
    """Close a group."""
    call(visit, "select queue.close_group(%(name)s)", name=visit.form.text("name"))
    return visit.go("/groups")


def act_on_schedule(visit: Visit) -> Response:
    """Enable, disable, run or remove a schedule."""
    name = visit.form.text("name")
    statements = {
        "enable": "select queue.enable_schedule(%(name)s)",
        "disable": "select queue.enable_schedule(%(name)s, false)",
        "run_now": "select queue.run_now(%(name)s)",
        "unschedule": "select queue.unschedule(%(name)s)",
    }
    asked = visit.form.text("action")
    if asked not in statements:
        raise BadRequest
    call(visit, statements[asked], name=name)
    return visit.go("/schedules")


ACTIONS: dict[str, Callable[[Visit], Response]] = {
    "/jobs/act": act_on_jobs,
    "/jobs/{id:id}/{action}": act_on_job,
    "/groups/act": act_on_group,
    "/queues/act": act_on_queue,
    "/schedules/act": act_on_schedule,
}
