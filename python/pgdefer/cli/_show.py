"""Shows values: control characters can't reach the terminal, and long values are cut.

Tests: integration/test_cli_jobs.py, integration/test_cli_screens.py.
"""

from __future__ import annotations

import base64
import codecs
import datetime as dt
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from pgdefer import _text
from pgdefer.codec import TAG

from ._base import REFUSALS, Exit, Number, Rows, err, fail, out

count_of = _text.count_of
escaped = _text.escaped

CUT = 200
LINES = 100
STYLES = {
    "ready": "cyan",
    "running": "blue",
    "succeeded": "green",
    "failed": "red",
    "upstream_failed": "red",
    "cancelled": "magenta",
    "held": "yellow",
    "ok": "green",
    "warn": "yellow",
    "fail": "bold red",
    "paused": "yellow",
    "dead": "red",
}
# What may have several lines; a newline in a name is escaped.
PROSE = ("description", "error", "message", "result")
STATE_COLUMNS = ("state", "status", "reason", "paused", "is_dead")


def short(text: str, length: int = CUT) -> str:
    """Return a text's beginning, with its size if the text is longer."""
    if len(text) <= length:
        return text
    return f"{text[:length]}… <{len(text.encode('utf-8', 'surrogatepass'))} bytes>"


def moment(value: dt.datetime, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return a moment in the session's time zone, to the second, with its offset."""
    return value.strftime(form) + value.isoformat(timespec="seconds")[19:].removesuffix(":00")


def span(value: dt.timedelta) -> str:
    """Return a duration with few digits: 1.2 ms, 3.45 s, 2:30:00, 3 d 4:00:00."""
    seconds = value.total_seconds()
    if seconds < 0:
        return "-" + span(-value)
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    days, rest = divmod(round(seconds), 86400)
    clock = f"{rest // 3600}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days} d {clock}" if days else clock


def size(value: int | None) -> str | None:
    """Return a number of bytes with few digits: 45 kB, 130 MB, 2.5 GB."""
    if value is None:
        return None
    number, units = value / 1024, ["GB", "MB", "kB"]
    while number >= 1000 and len(units) > 1:
        number /= 1024
        units.pop()
    return f"{number:.3g} {units[-1]}" if number < 999.5 else f"{number:.0f} {units[-1]}"


def cell(value: Any) -> str:
    """Return a value as the text of a table cell."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case dt.datetime():
            is_near = abs(dt.datetime.now(dt.UTC) - value) < dt.timedelta(days=300)
            return moment(value, "%m-%d %H:%M:%S" if is_near else "%Y-%m-%d %H:%M")
        case dt.timedelta():
            return span(value)
        case list():
            return ", ".join(map(cell, value))
        case dict():
            return short(escaped(compact(value)))
        case _:
            return short(escaped(str(value)))


def compact(value: Any) -> str:
    """Return a JSON value on one line, bytes and long texts cut."""
    return _dumps(_cut(value))


def pretty(value: Any, *, full: bool = False) -> str:
    """Return a JSON value on several lines; unless `full`, bytes and long texts cut."""
    return _dumps(value if full else _cut(value), "\n")


def _dumps(value: Any, line: str = "") -> str:
    """Return a value as JSON with the database's numbers; `line` begins each line."""
    match value:
        case Number():
            return str(value)
        case dict() if value:
            deeper = line and f"{line}  "
            parts = [f"{_dumps(key)}: {_dumps(item, deeper)}" for key, item in value.items()]
            inner, ends = f",{deeper or ' '}".join(parts), "{}"
        case list() if value:
            deeper = line and f"{line}  "
            inner, ends = f",{deeper or ' '}".join(_dumps(item, deeper) for item in value), "[]"
        case _:
            return json.dumps(value, ensure_ascii=False)
    return f"{ends[0]}{deeper}{inner}{line}{ends[1]}"


def _cut(value: Any) -> Any:
    match value:
        case {"__pgdefer__": "bytes", "value": str(data)} if (size := _size_of(data)) is not None:
            return f"<{size} bytes>"
        case dict() if len(value) > CUT:
            first = dict(list(value.items())[:CUT])
            return {**_cut(first), "…": f"<{len(value)} keys>"}
        case dict():
            return {key: _cut(item) for key, item in value.items()}
        case list() if len(value) > CUT:
            return [*map(_cut, value[:CUT]), f"… <{len(value)} items>"]
        case list():
            return [_cut(item) for item in value]
        case str() if not isinstance(value, Number):
            return short(value)
        case _:
            return value


def _size_of(data: str) -> int | None:
    """Return how many bytes a text stands for, None if it is no base64."""
    try:
        return len(base64.b64decode(data))
    except ValueError:
        return None


assert TAG == "__pgdefer__"  # as in the pattern above


def table(
    rows: Rows,
    columns: Mapping[str, str],
    *,
    right: Sequence[str] = (),
    least: Sequence[str] = (),
    folded: Sequence[str] = (),
    empty: str = "None.",
) -> None:
    """Print rows as a table of some columns (column: heading), or all of them as JSON."""
    if rows.texts is not None:
        print_json(rows.texts)
        return
    if not rows.values:
        err.print(empty, highlight=False)
        return
    out.print(grid(rows, columns, right=right, least=least, folded=folded))


def grid(
    rows: Rows,
    columns: Mapping[str, str],
    *,
    right: Sequence[str] = (),
    least: Sequence[str] = (),
    folded: Sequence[str] = (),
    is_noted: bool = True,
) -> Table:
    """Return rows as a table. A column that is empty in every row is left out.

    If the terminal is too narrow, long texts are cut, and those of `folded` columns broken into
    lines. Then the `least` columns are left out, in that order, then the last ones. A note says so.
    """
    shown = [key for key in columns if any(row[key] is not None for row in rows.values)]
    texts = {key: [cell(row[key]) for row in rows.values] for key in shown}
    widths, least_widths = {}, {}
    for key in shown:
        heading = max(map(cell_len, columns[key].split() or [""]))
        widths[key] = max(heading, *map(cell_len, texts[key]))
        is_text = any(isinstance(row[key], str | list | dict) for row in rows.values)
        can_give_way = is_text and key not in STATE_COLUMNS
        least_widths[key] = max(heading, min(widths[key], 10)) if can_give_way else widths[key]
    lost = [key for key in (*least, *reversed(shown)) if key in shown]
    lost = [key for key in dict.fromkeys(lost) if key != shown[0]]
    left_out: list[str] = []
    while lost and _width([least_widths[key] for key in shown]) > out.width:
        left_out.append(lost.pop(0))
        shown.remove(left_out[-1])
    _fit(widths, least_widths, shown)
    _unfold(widths, columns, shown)
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for key in shown:
        values = [row[key] for row in rows.values]
        is_number = any(isinstance(value, int | float | Decimal) for value in values)
        is_right = key in right or (is_number and key != "id")
        is_folded = key in folded
        made.add_column(
            columns[key],
            justify="right" if is_right else "left",
            overflow="fold" if is_folded else "ellipsis",
            no_wrap=not is_folded,
            width=widths[key],
        )
    for column in made.columns:
        column.header = Text(str(column.header), no_wrap=False, overflow="fold")
    for number, row in enumerate(rows.values):
        made.add_row(*(Text(texts[key][number], style=_style(key, row[key])) for key in shown))
    if left_out and is_noted:
        names = ", ".join(columns[key] or key for key in columns if key in left_out)
        made.caption = Text(f"no room for: {names}", style="dim")
        made.caption_justify = "left"
    return made


def _width(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1) + 1


def _fit(widths: dict[str, int], least: Mapping[str, int], shown: Sequence[str]) -> None:
    """Make the widest columns narrower until all fit, if they can."""
    for key in shown:
        widths[key] = max(least[key], min(widths[key], out.width))
    while _width([widths[key] for key in shown]) > out.width:
        key = max(shown, key=lambda each: (widths[each] > least[each], widths[each]))
        if widths[key] <= least[key]:
            return
        widths[key] -= 1


def _unfold(widths: dict[str, int], columns: Mapping[str, str], shown: Sequence[str]) -> None:
    """Write headings on one line if there is room."""
    wanted = {key: max(widths[key], cell_len(columns[key])) for key in shown}
    if _width(list(wanted.values())) <= out.width:
        widths.update(wanted)


def _style(key: str, value: Any) -> str:
    if key == "is_alive":
        return "" if value else "red"
    return STYLES.get(value, "") if key in STATE_COLUMNS else ""


def record(values: Mapping[str, Any], *, full: bool = False) -> None:
    """Print a row as lines `column: value`."""
    for key, value in values.items():
        if value is not None and value not in ([], {}):
            style = _style(key, value) if isinstance(value, str) and not full else ""
            text = Text(_value_text(key, value, full=full), style=style)
            out.print(Text(f"{key}: ", style="bold"), text, sep="", soft_wrap=True)


def _value_text(key: str, value: Any, *, full: bool) -> str:
    """Return the text of a value for `record`; unless `full`, it is cut."""
    if isinstance(value, dict | list) and key != "needs":
        lines = pretty(value, full=full).split("\n")
        if len(lines) > LINES and not full:
            size = len(_dumps(value).encode("utf-8", "surrogatepass"))
            lines = [*lines[:LINES], f"… <{size} bytes>"]
        return "\n".join(map(escaped, lines))
    if isinstance(value, str):
        lines = value.split("\n") if key in PROSE else [value]
        if full:
            return "\n".join(map(escaped, lines))
        text = "\n".join(escaped(short(line, 2000)) for line in lines[:50])
        return f"{text}\n… {len(lines)} lines" if len(lines) > 50 else text
    return moment(value) if isinstance(value, dt.datetime) else cell(value)


def answer(rows: Rows, words: Callable[[Mapping[str, Any]], str]) -> None:
    """Print the only row of a call: as JSON, or in words."""
    if rows.texts is not None:
        write(rows.texts[0])
    else:
        out.print(Text(words(rows.values[0])), soft_wrap=True)


def only_record(rows: Rows) -> None:
    """Print the only row of a call: as JSON, or with one value per line."""
    if rows.texts is not None:
        write(rows.texts[0])
    else:
        record(rows.values[0])


def outcomes(rows: Rows) -> None:
    """Print each job's outcome; refusals go to stderr."""
    if rows.texts is not None:
        print_json(rows.texts)
        return
    for row in rows.values:
        if row["error"] is None:
            out.print(Text(f"{row['id']}: {escaped(row['outcome'])}"))
        else:
            why = REFUSALS.get(row["error"], "it was refused")
            state = f" ({row['outcome']})" if row["outcome"] else ""
            err.print(Text(f"{row['id']}: {why}{state}", style="red"))


def print_json(texts: Sequence[str]) -> None:
    """Print rows as one JSON array, one per line."""
    write("[" + ",\n ".join(texts) + "]")


def write(text: str) -> None:
    """Print text for programs, unchanged except for what stdout's encoding lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "pgdefer.json").decode(encoding) + "\n")
    sys.stdout.flush()


def _as_json(error: UnicodeError) -> tuple[str, int]:
    """Return the JSON escapes of the characters that an encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error("pgdefer.json", _as_json)


def write_raw(values: Sequence[str | bytes]) -> None:
    """Print texts, in UTF-8, and bytes, one per line; a single bytes value without a newline."""
    end = b"" if len(values) == 1 and isinstance(values[0], bytes) else b"\n"
    for value in values:
        data = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
        sys.stdout.buffer.write(data + end)
    sys.stdout.flush()


def given(text: str) -> str:
    """Return the text of an argument; - stands for the text on stdin."""
    if text != "-":
        return text
    if sys.stdin is None:
        fail(Exit.USAGE, "- reads stdin, which is closed")
    try:
        # decoded here: in the locale C, stdin itself would let anything pass
        return sys.stdin.buffer.read().decode(sys.stdin.encoding)
    except UnicodeDecodeError as error:
        fail(Exit.USAGE, f"stdin: not {error.encoding} text: {error.reason}")


def _no_json(name: str) -> None:
    raise ValueError(f"it has no {name}")


def check_json(**texts: str | None) -> None:
    """Print a message and exit if a text is not JSON, or `options` is no object."""
    for name, text in texts.items():
        try:
            value = json.loads(text or "{}", parse_constant=_no_json)
        except ValueError as error:
            fail(Exit.USAGE, f"{name}: not JSON: {error}")
        except RecursionError:
            fail(Exit.USAGE, f"{name}: this JSON has too many levels")
        if name == "options" and not isinstance(value, dict):
            fail(Exit.USAGE, f"{name}: give a JSON object, as '{{\"held\": true}}'")
