"""Every function works under every setting of its caller, and returns the same.

pg_settings lists the settings that users may change. Each gets all its values, or its ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

pytestmark = pytest.mark.long

# Settings that affect the session itself: it ends, times out, or can read or write nothing.
LEFT_OUT = set(
    """
    backtrace_functions client_connection_check_interval default_table_access_method
    default_tablespace default_transaction_read_only exit_on_error
    idle_in_transaction_session_timeout idle_session_timeout lc_messages lc_monetary lc_numeric
    lc_time lock_timeout restrict_nonsystem_relation_kind role seed session_authorization
    ssl_renegotiation_limit statement_timeout tcp_keepalives_count tcp_keepalives_idle
    tcp_keepalives_interval tcp_user_timeout temp_tablespaces transaction_deferrable
    transaction_isolation transaction_read_only transaction_timeout
    """.split()
)
REFUSED = {"default_transaction_isolation": "QJ008"}
STRINGS = {
    "search_path": ["", "pg_temp, public", "queue", "nowhere, pg_catalog"],
    "DateStyle": ["SQL, DMY", "SQL, MDY", "German, DMY", "Postgres, DMY", "ISO, YMD"],
    "TimeZone": ["Asia/Kolkata", "America/St_Johns", "Pacific/Kiritimati", "<+05>-05"],
    "timezone_abbreviations": ["India"],
    "client_encoding": ["LATIN1", "UTF8"],
    "plpgsql.extra_errors": ["all"],
    "plpgsql.extra_warnings": ["all"],
    "default_text_search_config": ["pg_catalog.german"],
    "application_name": ["a'b\\"],
}
SETTINGS = """
select name, vartype, setting, min_val, max_val, enumvals from pg_settings
where context = 'user' order by name
"""

RESET = """
do $$
declare
  v_table record;
begin
  for v_table in
    select c.relname from pg_class c
    where c.relnamespace = 'queue'::regnamespace and c.relkind = 'r'
      and c.relname not in ('installation', 'admission', 'cursor', 'minute_cursor', 'horizon')
  loop
    execute format('delete from queue.%I', v_table.relname);
  end loop;
  perform setval('queue.job_id_seq', 1000), setval('queue.needed_seq', 0),
    setval('queue.awaited_seq', 0), setval(pg_get_serial_sequence('queue.worker', 'id'), 100);
  perform queue.register_task('u');
end $$
"""

ROUND = Path(__file__).with_name("settings_round.sql")


def statements() -> list[str]:
    lines = ROUND.read_text("utf-8").splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("--"))
    return [each for each in text.split(";\n") if each.strip()]


def changes(
    settings: list[tuple[str, str, str, str, str, list[str]]], is_fine: bool
) -> list[dict[str, str]]:
    """Return what to set, together or apart.

    Texts and enumerations decide how values are read and written. Switches and numbers mostly
    concern the planner, and get both of their ends. If `is_fine`, each of the former alone, and ten
    of the latter at once. Otherwise the first value of each of the former, then the second, and so
    on: this finds the same errors, but not their causes.
    """
    alone, low, high = [], [], []
    for name, kind, now, least, most, enum in settings:
        if name in LEFT_OUT or name.startswith(("debug_print_", "debug_pretty_", "icu_")):
            continue
        if name in STRINGS:
            alone += [{name: value} for value in STRINGS[name]]
        elif kind == "enum":
            # For levels of logging, and the like, only the ends.
            alone += [{name: enum[n]} for n in {0, len(enum) - 1} if enum[n] != now]
            alone += [{name: value} for value in enum[1:-1] if value != now and len(enum) < 5]
        elif kind == "bool":
            low.append((name, "off" if now == "on" else "on"))
        elif kind in ("integer", "real"):
            low.append((name, least))
            high.append((name, most))
    # Not more at their higher ends, or planning takes minutes.
    sizes = [(low, 10 if is_fine else 40), (high, 10)]
    batches = [dict(ends[n : n + size]) for ends, size in sizes for n in range(0, len(ends), size)]
    if is_fine:
        return alone + batches
    refused = [change for change in alone if change.keys() & REFUSED.keys()]
    together: list[dict[str, str]] = []
    for (name, value), *_ in (change.items() for change in alone if change not in refused):
        if not (place := next((batch for batch in together if name not in batch), None)):
            together.append(place := {})
        place[name] = value
    return together + refused + batches


def play(connection: psycopg.Connection[Any]) -> Iterator[object]:
    """Make all calls, yielding the result of each, or its error."""
    for statement in statements():
        try:
            cursor = connection.execute(statement.encode())
            yield statement, cursor.fetchall() if cursor.description else None
        except psycopg.Error as error:
            yield statement, error.sqlstate, str(error)


@pytest.fixture
def prepared(conn: psycopg.Connection[Any]) -> Iterator[psycopg.Connection[Any]]:
    conn.execute("create role settings_role")
    conn.execute("create table public.settings (b bytea, t text, f double precision, i interval)")
    conn.execute(
        "create trigger defer after insert on public.settings for each row"
        " execute function queue.defer_trigger('u', '{\"priority\": 2}')"
    )
    conn.prepare_threshold = None
    conn.execute("load 'plpgsql'")
    yield conn
    conn.execute("reset role")
    conn.execute("select queue.revoke_access('settings_role')")
    conn.execute("drop role settings_role")


@pytest.mark.parametrize(
    "is_fine",
    [
        pytest.param(False, id="together"),
        pytest.param(True, id="each alone", marks=pytest.mark.soak),  # half a minute of computing
    ],
)
def test_every_setting(prepared: psycopg.Connection[Any], is_fine: bool) -> None:
    def begin() -> None:
        prepared.execute("reset all")
        # Compiling changes no answer, but takes minutes at such plan costs.
        prepared.execute("set client_min_messages = error; set jit = off")
        prepared.execute(RESET)

    settings = prepared.execute(SETTINGS.encode()).fetchall()
    begin()
    expected = list(play(prepared))
    wrong = [each for each in expected if len(each) == 3]
    assert not wrong, wrong
    begin()
    again = list(play(prepared))
    assert again == expected, "the round itself changes"
    failures: list[object] = []
    tried = 0
    for change in changes(settings, is_fine):
        begin()
        for name, value in change.items():
            with contextlib.suppress(psycopg.Error):  # this setting is not available here
                prepared.execute("select set_config(%s, %s, false)", (name, value))
                tried += 1
        is_refused = False  # then the later results differ
        for want, found in zip(expected, play(prepared), strict=True):
            if found != want and not (
                is_refused := found[1] in map(REFUSED.get, change) or is_refused
            ):
                failures.append((change, found, want))
                break
    begin()
    assert not failures, "\n".join(str(failure)[:3000] for failure in failures)
    assert tried > 100
