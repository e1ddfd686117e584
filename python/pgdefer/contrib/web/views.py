"""Pages that only show something.

Tests: contrib/test_web.py, browser/test_pages.py.
"""

from __future__ import annotations

import urllib.parse

from cron_descriptor import FormatError, Options, get_description
from starlette.responses import Response

from pgdefer.options import STATES

from . import plots, queries
from .actions import JOB_ACTIONS, MANY_ACTIONS, is_possible
from .drawing import draw
from .matches import FAR, NEAR, TIMES, filters_of, find, used_filters
from .visit import NotFound, Visit, templates

__all__ = ["VIEWS"]

PAGE = 50


def now(visit: Visit) -> Response:
    """Show the state of the queue at a glance."""
    may = visit.session
    return visit.page(
        "now.html",
        health=visit.figure(queries.HEALTH) if may.sees("health") else None,
        metrics=visit.figure(queries.METRICS) if may.sees("metrics") else None,
        series=visit.figure(queries.SERIES) if may.sees("series") else None,
    )


def jobs(visit: Visit) -> Response:
    """List and search jobs, newest first."""
    asked = filters_of(visit.query)
    looks = FAR if visit.query.flag("far") else NEAR
    rows, end = find(visit, asked, visit.query.number("before"), PAGE, looks)
    return visit.page(
        "jobs.html",
        jobs=rows,
        asked=asked,
        filters=used_filters(asked),
        states=STATES,
        times=TIMES,
        end=end,
        link=lambda **more: "?" + urllib.parse.urlencode({**used_filters(asked), **more}),
        actions=[a for a in MANY_ACTIONS.values() if visit.session.may(a.function)],
        done=visit.query.maybe("done"),
    )


def job(visit: Visit) -> Response:
    """Show a job: its history, steps, why it is not running, its needs, and who changed it."""
    id = visit.request.path_params["id"]
    found = next(iter(visit.read(queries.JOB, id=id)), None)
    if found is None:
        raise NotFound
    may = visit.session
    steps = visit.read(queries.STEPS, id=id) if may.sees("steps") else []
    has_steps = bool(steps) or not may.sees("steps")
    possible = [a for a in JOB_ACTIONS.values() if is_possible(a, found, has_steps=has_steps)]
    return visit.page(
        "job.html",
        job=found,
        why=visit.read(queries.WHY, id=id)[0]["why"] if may.sees("why") else None,
        timeline=visit.read(queries.TIMELINE, id=id),
        waits=visit.read(queries.WAITS, id=id) if may.sees("waits_for") else [],
        streams=visit.read(queries.STREAMS, id=id) if may.sees("streams") else [],
        steps=steps,
        attempts=visit.read(queries.ATTEMPTS, id=id),
        graph=visit.read(queries.GRAPH, id=id) if may.sees("graph") else [],
        audit=visit.read(queries.AUDIT_OF_JOB, id=id) if may.sees("audit") else [],
        actions=[a for a in possible if may.may(a.function)],
        done=visit.query.maybe("done"),
    )


def graph(visit: Visit) -> Response:
    """Draw the jobs that a job needs, and those that need it."""
    id = visit.request.path_params["id"]
    rows = visit.read(queries.GRAPH, id=id)
    return visit.page("graph.html", id=id, drawing=draw(rows))


def stream(visit: Visit) -> Response:
    """Show the last values that a job has emitted to a stream, or those after a number."""
    id = visit.request.path_params["id"]
    name = visit.query.text("name")
    if not name:
        raise NotFound
    found = next(iter(visit.read(queries.ONE_STREAM, id=id, name=name)), None)
    if found is None:
        raise NotFound
    size = found["size"]
    asked = visit.query.number("after")
    after = max(size - PAGE, 0) if asked is None else asked
    values = visit.read(queries.STREAM, id=id, name=name, after=after)
    last = values[-1]["no"] if values else after
    return visit.page(
        "stream.html",
        id=id,
        stream=name,
        size=size,
        values=values[::-1],
        is_live=asked is None,
        older=max(after - PAGE, 0) if after > 0 else None,
        newer=last if last < size else None,
        link=lambda **more: "?" + urllib.parse.urlencode({"name": name, **more}),
    )


def queues(visit: Visit) -> Response:
    """List queues, with their limits."""
    counts = visit.figure(queries.QUEUE_COUNTS)
    return visit.page(
        "queues.html",
        queues=visit.read(queries.QUEUES),
        counts={row["name"]: row for row in counts or []},
        is_counted=counts is not None,
    )


def locks(visit: Visit) -> Response:
    """List locks, limits and shares: their holders, and how many jobs wait."""
    return visit.page(
        "locks.html",
        locks=visit.figure(queries.LOCKS),
        semaphores=visit.read(queries.SEMAPHORES),
        shares=visit.read(queries.SHARES) if visit.session.sees("shares") else [],
    )


def groups(visit: Visit) -> Response:
    """List groups: their jobs by state, and the jobs that their callbacks have deferred."""
    return visit.page(
        "groups.html",
        groups=visit.read(queries.GROUPS),
        may_close=visit.session.may("close_group"),
    )


def schedules(visit: Visit) -> Response:
    """List schedules."""
    return visit.page("schedules.html", schedules=visit.read(queries.SCHEDULES))


def schedule(visit: Visit) -> Response:
    """Show a schedule: its next runs, and its past runs."""
    name = visit.query.text("name")
    found = next(iter(visit.read(queries.SCHEDULE, name=name)), None)
    if found is None:
        raise NotFound
    return visit.page(
        "schedule.html",
        schedule=found,
        in_words=in_words(found["cron"]),
        next_runs=visit.read(queries.NEXT_RUNS, name=name),
        runs=visit.read(queries.RUNS, name=name) if visit.session.sees("schedule_runs") else [],
    )


def in_words(cron: str) -> str:
    """Say what cron's fields mean; the other forms of schedules are words already."""
    options = Options()
    options.use_24hour_time_format = True
    try:
        words = str(get_description(cron, options))
    except FormatError:
        return ""
    *_, day, _month, weekday = cron.split()
    if "*" in (day, weekday):
        return words
    # The library's own "or" does not follow this rule, and only some forms have it.
    both = day.startswith("*") or weekday.startswith("*")
    rule = "both days must match" if both else "either day is enough"
    return f"{words.replace(', or on ', ', on ')}; {rule}"


def workers(visit: Visit) -> Response:
    """List workers, and what each runs."""
    running: dict[int, list[dict[str, object]]] = {}
    for job in visit.read(queries.RUNNING):
        running.setdefault(job["worker_id"], []).append(job)
    return visit.page("workers.html", workers=visit.read(queries.WORKERS), running=running)


def tasks(visit: Visit) -> Response:
    """List tasks: their defaults, and what happened within a day."""
    return visit.page(
        "tasks.html",
        tasks=visit.read(queries.TASKS),
        stats=visit.figure(queries.TASK_STATS) if visit.session.sees("task_stats") else None,
    )


def audit(visit: Visit) -> Response:
    """List who changed what."""
    query = visit.query
    asked = {"role": query.maybe("role"), "call": query.maybe("call")}
    rows = visit.read(queries.AUDIT, before=query.number("before"), **asked)
    more = None
    if len(rows) > PAGE:
        filters = {name: value for name, value in asked.items() if value is not None}
        more = urllib.parse.urlencode({**filters, "before": rows[PAGE - 1]["id"]})
    return visit.page("audit.html", audit=rows[:PAGE], asked=asked, more=more)


# The path and name of each page, and what the role must be able to read to see it offered.
VIEWS = {
    "/": (now, "Now", "jobs"),
    "/jobs": (jobs, "Jobs", "search"),
    "/queues": (queues, "Queues", "queues"),
    "/locks": (locks, "Locks and limits", "locks"),
    "/groups": (groups, "Groups", "groups"),
    "/workers": (workers, "Workers", "workers"),
    "/schedules": (schedules, "Schedules", "schedules"),
    "/tasks": (tasks, "Tasks", "tasks"),
    "/audit": (audit, "Audit", "audit"),
    "/jobs/{id:id}": (job, None, "jobs"),
    "/jobs/{id:id}/graph": (graph, None, "graph"),
    "/jobs/{id:id}/stream": (stream, None, "streams"),
    "/schedule": (schedule, None, "schedules"),
}

templates.globals |= {"bar_plot": plots.bar_plot, "line_plot": plots.line_plot}
templates.filters["duration"] = plots.duration
templates.globals["places"] = [
    (path, label, needs) for path, (_, label, needs) in VIEWS.items() if label is not None
]
