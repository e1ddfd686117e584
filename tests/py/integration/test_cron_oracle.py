"""queue.next_runs against cronsim, croniter and the definition itself.

docs/recurring.md lists where the two libraries differ from each other and from the queue, and
test_known_differences tests it. Everywhere else all must agree.
"""

import calendar
import dataclasses
import random
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

import psycopg
import pytest
from croniter import croniter
from cronsim import CronSim

pytestmark = [pytest.mark.client, pytest.mark.long]

SEED = 20240229
RUNS = 4
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
MONTHS = "JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC".split()
WEEKDAYS = "SUN MON TUE WED THU FRI SAT".split()
# Gaps at midnight, half-hour and quarter-hour offsets, a shift of 30 minutes and one of two hours,
# a skipped day, changes at 0:01, four changes a year
ZONES = [
    "UTC",
    "Africa/Cairo",
    "Africa/Casablanca",
    "America/Asuncion",
    "America/Havana",
    "America/New_York",
    "America/Santiago",
    "America/Sao_Paulo",
    "America/St_Johns",
    "Antarctica/Troll",
    "Asia/Amman",
    "Asia/Beirut",
    "Asia/Kathmandu",
    "Asia/Kolkata",
    "Asia/Tehran",
    "Atlantic/Azores",
    "Australia/Adelaide",
    "Australia/Lord_Howe",
    "Europe/Dublin",
    "Europe/London",
    "Europe/Paris",
    "Pacific/Apia",
    "Pacific/Chatham",
    "Pacific/Kiritimati",
]


@dataclasses.dataclass(frozen=True)
class Change:
    """The first instant of a new offset, and the offsets before and from then on."""

    at: datetime
    old: timedelta
    new: timedelta

    @property
    def is_plain(self) -> bool:
        """An hour, forward or back, on the hour, and not at midnight."""
        shown = self.at + self.old
        return (
            abs(self.new - self.old) == HOUR
            and shown.minute == 0
            and shown.hour > 0
            and (self.new > self.old or shown.hour > 1)
        )


def offset(instant: datetime, zone: str) -> timedelta:
    found = instant.astimezone(ZoneInfo(zone)).utcoffset()
    assert found is not None
    return found


@cache
def changes(zone: str) -> tuple[Change, ...]:
    """The changes of a zone's offset from 1990 to 2035."""
    found = []
    low = datetime(1990, 1, 1, tzinfo=UTC)
    while low.year < 2036:
        high = low + DAY
        old, new = offset(low, zone), offset(high, zone)
        if old != new:
            before, after = low, high
            while after - before > MINUTE:
                middle = before + (after - before) // MINUTE // 2 * MINUTE
                if offset(middle, zone) == old:
                    before = middle
                else:
                    after = middle
            found.append(Change(after, old, new))
        low = high
    return tuple(found)


def changes_between(zone: str, low: datetime, high: datetime) -> list[Change]:
    return [change for change in changes(zone) if low < change.at <= high]


@dataclasses.dataclass(frozen=True)
class Expression:
    """A cron expression and, apart from its text, its meaning."""

    fields: tuple[str, ...]
    seconds: frozenset[int]
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    # which of a weekday's dates in a month: None means all, -1 the last one
    nth: int | None

    @property
    def text(self) -> str:
        return " ".join(self.fields)

    @property
    def croniter_text(self) -> str:
        """The same for croniter, which writes the last Friday as L5."""
        last = self.nth == -1
        return " ".join((*self.fields[:-1], "L" + self.fields[-1][0])) if last else self.text

    @property
    def follows_elapsed_time(self) -> bool:
        return self.fields[-5][0] == "*" or self.fields[-4][0] == "*"

    @property
    def needs_both_days(self) -> bool:
        return self.fields[-3][0] == "*" or self.fields[-1][0] == "*"

    def has_date(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        last = calendar.monthrange(day.year, day.month)[1]
        by_month = day.day in self.days or (0 in self.days and day.day == last)
        by_week = day.isoweekday() % 7 in self.weekdays and (
            self.nth is None
            or (self.nth == -1 and day.day + 7 > last)
            or (day.day + 6) // 7 == self.nth
        )
        return (by_month and by_week) if self.needs_both_days else (by_month or by_week)

    def has_minute(self, local: datetime) -> bool:
        return (
            local.minute in self.minutes
            and local.hour in self.hours
            and self.has_date(local.date())
        )

    @property
    def is_possible(self) -> bool:
        first = date(2000, 1, 1)
        return any(self.has_date(first + timedelta(days=day)) for day in range(28 * 366))


def field(
    pick: random.Random, low: int, high: int, names: list[str] | None = None
) -> tuple[str, frozenset[int]]:
    """A random field and its values."""

    def value(number: int) -> str:
        text = names[number - low] if names and pick.random() < 0.3 else str(number)
        return pick.choice([text, text.lower(), text.capitalize()])

    def span() -> tuple[int, int]:
        first, last = sorted(pick.sample(range(low, high + 1), 2))
        return first, last

    kind = pick.random()
    if kind < 0.3:
        return "*", frozenset(range(low, high + 1))
    if kind < 0.45:
        step = pick.choice([1, 2, 3, 5, 7, 10, 15, 20, 30])
        return f"*/{step}", frozenset(range(low, high + 1, step))
    if kind < 0.7:
        number = pick.randint(low, high)
        return value(number), frozenset([number])
    if kind < 0.8:
        numbers = [pick.randint(low, high) for _ in range(pick.randint(2, 4))]
        return ",".join(map(value, numbers)), frozenset(numbers)
    first, last = span()
    if kind < 0.9:
        return f"{value(first)}-{value(last)}", frozenset(range(first, last + 1))
    if kind < 0.95:
        step = pick.randint(1, 6)
        return f"{first}-{last}/{step}", frozenset(range(first, last + 1, step))
    extra = pick.randint(low, high)
    return f"{first}-{last},{extra}", frozenset(range(first, last + 1)) | {extra}


def expression(pick: random.Random) -> Expression:
    """A random expression that has a date; hours near those at which clocks change."""
    anything = {"day": frozenset(range(1, 32)), "week": frozenset(range(7))}
    seconds = ("0", frozenset([0]))
    if pick.random() < 0.25:
        seconds = field(pick, 0, 59)
    hours = field(pick, 0, 23)
    if pick.random() < 0.7:
        hours = pick.choice(
            [
                ("*", frozenset(range(24))),
                ("*/2", frozenset(range(0, 24, 2))),
                ("0", frozenset([0])),
                ("1", frozenset([1])),
                ("2", frozenset([2])),
                ("1,2", frozenset([1, 2])),
                ("0-3", frozenset(range(4))),
                ("23", frozenset([23])),
            ]
        )
    days = field(pick, 1, 31) if pick.random() < 0.4 else ("*", anything["day"])
    if pick.random() < 0.1:
        days = ("L", frozenset([0]))
    months = field(pick, 1, 12, MONTHS) if pick.random() < 0.3 else ("*", frozenset(range(1, 13)))
    weekdays = field(pick, 0, 6, WEEKDAYS) if pick.random() < 0.4 else ("*", anything["week"])
    nth: int | None = None
    if pick.random() < 0.1:
        weekday = pick.randrange(7)
        nth = pick.choice([1, 2, 3, 4, 5, -1])
        suffix = "L" if nth == -1 else f"#{nth}"
        weekdays = (f"{weekday}{suffix}", frozenset([weekday]))
    parts = [seconds, field(pick, 0, 59), hours, days, months, weekdays]
    if seconds[0] == "0":
        parts = parts[pick.randrange(2) :]
    made = Expression(
        tuple(text for text, _ in parts),
        seconds[1],
        *(numbers for _, numbers in parts[-5:]),
        nth=nth,
    )
    return made if made.is_possible else expression(pick)


def starts(pick: random.Random, zone: str) -> Iterator[datetime]:
    """Instants around changes of the offset, leap days and year ends, and others."""
    while True:
        year = pick.randint(1990, 2029)
        yield datetime(year, 12, 31, 12, tzinfo=UTC) + pick.randint(-1440, 1440) * MINUTE
        yield datetime(year, 2, 28, 12, tzinfo=UTC) + pick.randint(-2160, 2160) * MINUTE
        yield datetime(year, 1, 1, tzinfo=UTC) + timedelta(seconds=pick.randrange(365 * 86400))
        if changes(zone):
            change = pick.choice(changes(zone))
            for _ in range(4):
                yield change.at + timedelta(seconds=pick.randint(-7 * 3600, 4 * 3600))
            yield change.at - pick.randint(0, 4320) * MINUTE


@dataclasses.dataclass(frozen=True)
class Case:
    expression: Expression
    zone: str
    after: datetime

    def __str__(self) -> str:
        return f"{self.expression.text!r} in {self.zone} after {self.after}"


def ours(conn, cases: list[Case], runs: int) -> list[list[datetime]]:
    query = """
        select array(select queue.next_runs(c, z, a, %s))
        from unnest(%s::text[], %s::text[], %s::timestamptz[]) with ordinality as x(c, z, a, i)
        order by i"""
    parameters = [
        runs,
        [case.expression.text for case in cases],
        [case.zone for case in cases],
        [case.after for case in cases],
    ]
    return [[run.astimezone(UTC) for run in row] for (row,) in conn.execute(query, parameters)]


def by_cronsim(case: Case) -> list[datetime]:
    found = CronSim(case.expression.text, case.after.astimezone(ZoneInfo(case.zone)))
    return [next(found).astimezone(UTC) for _ in range(RUNS)]


def by_croniter(case: Case) -> list[datetime]:
    found = croniter(
        case.expression.croniter_text,
        case.after.astimezone(ZoneInfo(case.zone)),
        implement_cron_bug=True,
        second_at_beginning=True,
    )
    return [found.get_next(datetime).astimezone(UTC) for _ in range(RUNS)]


@cache
def clock(zone: str, low: datetime, high: datetime) -> list[tuple[datetime, datetime]]:
    """Every minute from `low` to `high`, and the local time of the zone then."""
    found = []
    while low < high:
        found.append((low, (low + offset(low, zone)).replace(tzinfo=None)))
        low += MINUTE
    return found


def by_definition(case: Case, low: datetime, high: datetime) -> list[datetime]:
    """The runs until `high`, by watching the zone's clocks minute by minute from `low` on.

    With fixed times, a local time runs when clocks first reach it, and those that clocks skip run
    right after the change. An expression that follows elapsed time runs whenever clocks show a
    matching time.
    """
    expression = case.expression
    found = set()
    shown = clock(case.zone, low, high)
    reached = shown[0][1] - MINUTE
    for at, local in shown:
        if not expression.follows_elapsed_time:
            if local <= reached:
                continue
            for leapt in range(1, (local - reached) // MINUTE):
                if expression.has_minute(reached + MINUTE * leapt):
                    found.add(at)
            reached = local
        if expression.has_minute(local):
            found |= {at + timedelta(seconds=second) for second in expression.seconds}
    return sorted(run for run in found if run > case.after)


def cronsim_is_right(case: Case, near: list[Change]) -> bool:
    if case.expression.follows_elapsed_time:
        return all(change.is_plain for change in near)
    is_second_pass = bool(case.after.astimezone(ZoneInfo(case.zone)).fold)
    return not near or (len(case.expression.fields) == 5 and not is_second_pass)


def croniter_is_right(case: Case, near: list[Change]) -> bool:
    if case.expression.nth is not None and not case.expression.needs_both_days:
        return False
    if case.expression.follows_elapsed_time:
        return all(change.is_plain and change.new < change.old for change in near)
    return not near or (
        0 in case.expression.seconds and all(change.new > change.old for change in near)
    )


@pytest.fixture
def zones(conn) -> list[str]:
    """The zones for which PostgreSQL and Python know the same changes."""
    query = """
        select extract(epoch from (i at time zone %s) - (i at time zone 'UTC'))::int
        from unnest(%s::timestamptz[]) with ordinality as x(i, n) order by n"""
    same = []
    for zone in ZONES:
        instants = [
            change.at + timedelta(seconds=second) for change in changes(zone) for second in (-1, 0)
        ]
        theirs = [timedelta(seconds=row[0]) for row in conn.execute(query, [zone, instants])]
        if theirs == [offset(instant, zone) for instant in instants]:
            same.append(zone)
    assert len(same) >= len(ZONES) - 4
    return same


# The number of cases: the long form takes a minute of computing.
many = pytest.mark.parametrize("n", [4, pytest.param(20, marks=pytest.mark.soak)])


@many
def test_agrees_with_libraries(conn, zones, n):
    pick = random.Random(SEED)
    cases = []
    for zone in zones:
        instants = starts(pick, zone)
        cases += [Case(expression(pick), zone, next(instants)) for _ in range(20 * n)]

    compared = dict.fromkeys(["no change near", "cronsim", "croniter"], 0)
    for case, expected in zip(cases, ours(conn, cases, RUNS), strict=True):
        assert len(expected) == RUNS, case
        assert expected == sorted(set(expected)), case
        assert expected[0] > case.after, case
        near = changes_between(case.zone, case.after - DAY, expected[-1] + DAY)
        compared["no change near"] += not near
        if cronsim_is_right(case, near):
            compared["cronsim"] += 1
            assert by_cronsim(case) == expected, case
        if croniter_is_right(case, near):
            compared["croniter"] += 1
            assert by_croniter(case) == expected, case
    assert compared["no change near"] > 175 * n, compared
    assert compared["cronsim"] > 250 * n, compared
    assert compared["croniter"] > 225 * n, compared


@many
def test_agrees_with_the_definition_around_changes(conn, zones, n):
    pick = random.Random(SEED)
    cases, windows = [], []
    for zone in zones:
        for change in pick.sample(changes(zone), min(n // 2, len(changes(zone)))):
            for _ in range(12):
                after = change.at + timedelta(seconds=pick.randint(-20 * 3600, 26 * 3600))
                cases.append(Case(expression(pick), zone, after))
                windows.append((change.at - 21 * HOUR, change.at + 39 * HOUR))
    assert len(cases) > 90 * n

    compared = 0
    for case, runs, window in zip(cases, ours(conn, cases, 100), windows, strict=True):
        expected = by_definition(case, *window)[:100]
        assert [run for run in runs if run < window[1]] == expected, case
        compared += bool(expected)
    assert compared > 45 * n


def by(library: str, cron: str, zone: str, after: str) -> list[str]:
    """The next two runs according to a library, in UTC, or the name of its error."""
    at = datetime.fromisoformat(after + "Z").astimezone(ZoneInfo(zone))
    try:
        if library == "cronsim":
            found = CronSim(cron, at)
            runs = [next(found), next(found)]
        else:
            theirs = croniter(cron, at, implement_cron_bug=True, second_at_beginning=True)
            runs = [theirs.get_next(datetime), theirs.get_next(datetime)]
    except Exception as error:
        return [type(error).__name__]
    return [run.astimezone(UTC).strftime("%m-%d %H:%M:%S") for run in runs]


# Expression, zone, start; the next two runs: ours, cronsim's and croniter's, None if as ours
DIFFERENCES = {
    "a fixed time that comes twice": (
        ("30 2 * * *", "Europe/Paris", "2024-10-26 12:00"),
        ["10-27 00:30:00", "10-28 01:30:00"],
        None,
        ["10-27 00:30:00", "10-27 01:30:00"],
    ),
    "a start between the two": (
        ("30 2 * * *", "Europe/Paris", "2024-10-27 01:10"),
        ["10-28 01:30:00", "10-29 01:30:00"],
        ["10-27 00:30:00", "10-28 01:30:00"],
        ["10-27 01:30:00", "10-28 01:30:00"],
    ),
    "elapsed time that leaps over all matches": (
        ("*/15 1 * * *", "Europe/London", "2024-03-30 12:00"),
        ["04-01 00:00:00", "04-01 00:15:00"],
        None,
        ["03-31 01:00:00", "04-01 00:00:00"],
    ),
    "seconds given, in a gap": (
        ("30 30 2 * * *", "America/New_York", "2024-03-10 00:00"),
        ["03-10 07:00:00", "03-11 06:30:30"],
        ["03-11 06:30:30", "03-12 06:30:30"],
        ["03-10 07:00:30", "03-11 06:30:30"],
    ),
    "seconds given, a time that comes twice": (
        ("0 30 1 * * *", "America/New_York", "2024-11-03 00:00"),
        ["11-03 05:30:00", "11-04 06:30:00"],
        ["11-03 05:30:00", "11-03 06:30:00"],
        ["11-03 05:30:00", "11-03 06:30:00"],
    ),
    "elapsed time, a gap at midnight": (
        ("* 1 * * */7", "Asia/Beirut", "2025-03-29 17:00"),
        ["03-29 22:00:00", "03-29 22:01:00"],
        ["04-05 22:00:00", "04-05 22:01:00"],
        None,
    ),
    "elapsed time, a change of 30 minutes": (
        ("*/10 4 * * *", "Australia/Lord_Howe", "2014-10-04 13:00"),
        ["10-04 17:00:00", "10-04 17:10:00"],
        ["10-04 17:30:00", "10-04 17:40:00"],
        None,
    ),
    "elapsed time, a skipped day": (
        ("*/20 * L * *", "Pacific/Kiritimati", "1994-12-30 10:00"),
        ["01-30 10:00:00", "01-30 10:20:00"],
        ["12-31 10:00:00", "01-30 10:00:00"],
        None,
    ),
    "either day field, one of them an n-th weekday": (
        ("0 0 1 * MON#2", "UTC", "2024-01-05 00:00"),
        ["01-08 00:00:00", "02-01 00:00:00"],
        None,
        ["CroniterBadDateError"],
    ),
    "a list that holds an asterisk": (
        ("0 0 1 * 1,*", "UTC", "2024-01-01 00:00"),
        ["01-02 00:00:00", "01-03 00:00:00"],
        None,
        ["02-01 00:00:00", "03-01 00:00:00"],
    ),
    "a range of one value with a step": (
        ("0 0 1-1/4 * *", "UTC", "2024-01-05 00:00"),
        ["02-01 00:00:00", "03-01 00:00:00"],
        ["01-09 00:00:00", "01-13 00:00:00"],
        ["01-09 00:00:00", "01-13 00:00:00"],
    ),
    "a step from one weekday on": (
        ("0 0 * * 5/2", "UTC", "2024-01-01 00:00"),
        ["01-05 00:00:00", "01-07 00:00:00"],
        None,
        ["01-05 00:00:00", "01-12 00:00:00"],
    ),
    "a range that ends on SUN": (
        ("0 0 * * SAT-SUN", "UTC", "2024-01-01 00:00"),
        ["01-06 00:00:00", "01-07 00:00:00"],
        ["CronSimError"],
        None,
    ),
    "a range that wraps around": (
        ("0 22-2 * * *", "UTC", "2024-01-01 12:00"),
        ["InvalidParameterValue"],
        ["CronSimError"],
        ["01-01 22:00:00", "01-01 23:00:00"],
    ),
    "the last Friday": (
        ("0 0 * * 5L", "UTC", "2024-01-01 00:00"),
        ["01-26 00:00:00", "02-23 00:00:00"],
        None,
        ["CroniterNotAlphaError"],
    ),
    "the last weekday of the month": (
        ("0 0 LW * *", "UTC", "2024-03-01 00:00"),
        ["03-29 00:00:00", "04-30 00:00:00"],
        None,
        ["CroniterNotAlphaError"],
    ),
    "no special value but those listed": (
        ("0 0 ? * MON", "UTC", "2024-01-01 00:00"),
        ["InvalidParameterValue"],
        ["CronSimError"],
        ["01-08 00:00:00", "01-15 00:00:00"],
    ),
    "dates that never come together": (
        ("0 0 */20 4 MON#4", "UTC", "2024-01-01 00:00"),
        ["InvalidParameterValue"],
        ["StopIteration"],
        ["CroniterBadDateError"],
    ),
}


def by_us(conn, cron: str, zone: str, after: str) -> list[str]:
    """The same according to the queue."""
    query = "select queue.next_runs(%s, %s, %s::timestamptz, 2)"
    try:
        runs = [run.astimezone(UTC) for (run,) in conn.execute(query, [cron, zone, after + "Z"])]
    except psycopg.errors.InvalidParameterValue as error:
        return [type(error).__name__]
    return [run.strftime("%m-%d %H:%M:%S") for run in runs]


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_known_differences(conn, difference):
    (cron, zone, after), expected, cronsim, iterated = DIFFERENCES[difference]
    assert by_us(conn, cron, zone, after) == expected
    assert by("cronsim", cron, zone, after) == (cronsim or expected)
    assert by("croniter", cron, zone, after) == (iterated or expected)
