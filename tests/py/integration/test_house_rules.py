"""House rules: calls go down the manifest, files and functions are short, comments name the locks.

The calls are read from the catalog, that is from the code that runs: a call is a name with `queue.`
before it and a parenthesis after it, outside comments and texts, unless it is a table's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
from psycopg import Connection

from releases import load_build
from support import ROOT

EXTENSION = ROOT / "extension"
SHARED = re.compile(r"(?:create role|create database|prepare transaction) (?:[a-z]\w+|'[^']+')")
COMMENTED = re.compile(r"(?m)^((?:--.*\n)*)create or replace (?:function|procedure) queue\.(\w+)\(")
DEFINITION = re.compile(r"(?m)^create or replace (?:function|procedure) queue\.(\w+)\(")
# What comments say of the admission lock, and which functions take it as others do not.
TAKES = re.compile(r"the admission lock,? (?:waited for|by try)")
HOLDS = re.compile(r"the caller holds the admission lock(?!, or)")
TAKERS = {"_lock_admission", "_wait_for_admission", "_await_admission"}
CHANGES = re.compile(
    r"\b(?:insert into|update|delete from) queue\.|\bfor (?:no key )?update\b"
    r"|\bfor (?:key )?share\b|\block table\b|\bpg_(?:try_)?advisory_|\bqueue\._lock_admission\("
)
CODE = """
select p.proname, p.prosrc || ' ' || coalesce(pg_get_expr(p.proargdefaults, 0), '')
from pg_proc p where p.pronamespace = 'queue'::regnamespace
"""


def files() -> list[str]:
    """Return the files of functions in the manifest's order."""
    return [e for e in load_build().manifest(EXTENSION) if not e.startswith("tables/")]


@pytest.fixture(scope="module")
def places() -> dict[str, int]:
    """Return the place in the manifest of the file that defines each function."""
    found: dict[str, int] = {}
    for place, entry in enumerate(files()):
        for name in DEFINITION.findall((EXTENSION / entry).read_text("utf-8")):
            assert name not in found, f"{name} is defined twice"
            found[name] = place
    return found


@pytest.fixture(scope="module")
def comments() -> dict[str, str]:
    """Return the comment above each function, in one line."""
    texts = [(EXTENSION / entry).read_text("utf-8") for entry in files()]
    found = [pair for text in texts for pair in COMMENTED.findall(text)]
    return {name: re.sub(r"\n?-- ?", " ", above) for above, name in found}


@pytest.fixture
def code(conn: Connection) -> dict[str, str]:
    """Return each function's code, by the catalog, without comments and texts."""
    bodies = conn.execute(CODE).fetchall()
    besides = re.compile(r"--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'", re.DOTALL)
    return {name: besides.sub(" ", body) for name, body in bodies}


@pytest.fixture
def calls(code: dict[str, str]) -> dict[str, set[str]]:
    """Return the functions that each function calls."""
    found = {}
    for name, text in code.items():
        without_tables = re.sub(r"\b(insert into|on) queue\.\w+", " ", text)
        called = set(re.findall(r"\bqueue\.(\w+)\s*\(", without_tables))
        found[name] = called & code.keys() - {name}
    return found


def below(calls: dict[str, set[str]], name: str, but: set[str]) -> set[str]:
    """Return the functions that a function calls, itself or by others, but for these others."""
    found: set[str] = set()
    todo = [name]
    while todo:
        new = calls[todo.pop()] - found - but
        found |= new
        todo += new
    return found


def exposed(calls: dict[str, set[str]], names: set[str], but: set[str]) -> set[str]:
    """Return the public functions among these and those that call them, but for calls by some."""
    found: set[str] = set()
    todo = names
    while todo:
        found |= todo
        todo = {caller for caller in calls if calls[caller] & todo} - but - found
    called = set[str]().union(*calls.values())
    return {name for name in found if not name.startswith("_") or name not in called}


def test_calls_lead_down_the_manifest(calls: dict[str, set[str]], places: dict[str, int]) -> None:
    assert sum(map(len, calls.values())) > 500, "the calls are not read"
    names = files()
    upwards = [
        f"{names[places[caller]]}: {caller} calls {callee} of {names[places[callee]]}"
        for caller, callees in sorted(calls.items())
        for callee in sorted(callees)
        if caller in places and callee in places and places[callee] > places[caller]
    ]
    assert not upwards, "\n".join(upwards)


def test_no_function_calls_itself_by_others(calls: dict[str, set[str]]) -> None:
    """A cycle of functions is a recursion whose depth depends on data."""
    assert not [name for name in calls if name in below(calls, name, set())]


def test_who_needs_the_admission_lock_has_it(
    calls: dict[str, set[str]], comments: dict[str, str]
) -> None:
    direct = {name for name in calls if calls[name] & {"_lock_admission", "_wait_for_admission"}}
    holders = {name for name, text in comments.items() if HOLDS.search(text)}
    assert len(holders) > 50, "the comments are not read"
    takers = {name for name in calls if name in direct or below(calls, name, holders) & direct}
    assert not [name for name in direct if "admission lock" not in comments[name]]
    assert not {name for name, text in comments.items() if TAKES.search(text)} - takers - TAKERS
    assert not exposed(calls, holders, takers)


def test_what_changes_state_says_which_locks_it_takes(
    code: dict[str, str], calls: dict[str, set[str]], comments: dict[str, str]
) -> None:
    """It, or all that call it."""
    said = {name for name, text in comments.items() if "locks" in text.lower()}
    changing = {name for name, text in code.items() if CHANGES.search(text)}
    assert len(changing) > 200, "the code is not read"
    assert not exposed(calls, changing - said, said)


def test_all_functions_are_seen(calls: dict[str, set[str]], places: dict[str, int]) -> None:
    built = {"_create_tables", "_own_relations", "_versions", "_step_indexes", "_migrate_tables"}
    assert calls.keys() - places.keys() == built


@pytest.mark.parametrize("entry", files())
def test_public_functions_come_first(entry: str) -> None:
    names = DEFINITION.findall((EXTENSION / entry).read_text("utf-8"))
    private = [name.startswith("_") for name in names]
    assert private == sorted(private)


def on_demand() -> list[Path]:
    """Return the files that are installed on demand."""
    return [
        path for name in load_build().ON_DEMAND for path in sorted((EXTENSION / name).glob("*.sql"))
    ]


def sources() -> list[Path]:
    return [*(EXTENSION / entry for entry in load_build().manifest(EXTENSION)), *on_demand()]


def test_files_and_lines_are_short() -> None:
    long = []
    for path in sources():
        lines = path.read_text("utf-8").splitlines()
        name = path.relative_to(EXTENSION)
        long += [f"{name}: {len(lines)} lines"] if len(lines) > 350 else []
        long += [
            f"{name}:{n}: {len(line)} wide" for n, line in enumerate(lines, 1) if len(line) > 110
        ]
    assert not long, "\n".join(long)


# The line above a longer function that says why it is not split.
REASON = "-- In one piece"


def test_functions_are_short_or_say_why() -> None:
    long = set()
    for path in sources():
        text = path.read_text("utf-8")
        for found in DEFINITION.finditer(text):
            quote = re.compile(r"\bas (\$\w*\$)").search(text, found.start())
            assert quote is not None
            size = text.count("\n", found.start(), text.index(quote[1], quote.end())) + 1
            above = text[: found.start()].rstrip("\n").rpartition("\n")[2]
            if (size > 80) != above.startswith(REASON):
                long.add(f"{found[1]}: {size} lines below {above!r}")
    assert not long


def test_tests_have_the_rooms_of_what_they_test() -> None:
    """A pgTAP file has the name of a file of functions; a spec adds what happens."""
    topics = {entry.removesuffix(".sql") for entry in files()}
    topics |= {path.relative_to(EXTENSION).with_suffix("").as_posix() for path in on_demand()}
    tests = ROOT / "tests" / "sql"
    names = [path.relative_to(tests).as_posix() for path in tests.rglob("*.*")]
    strangers = [name for name in names if re.sub(r"\..*", "", name) not in topics]
    assert strangers == ["conventions.sql"]


@pytest.mark.parametrize("entry", files())
def test_each_file_has_a_test_of_its_name_or_says_which(entry: str) -> None:
    tests = ROOT / "tests" / "sql"
    own = list((tests / entry).parent.glob(f"{Path(entry).stem}.*"))
    said = re.search(r"(?m)^-- Tests: (.+)\.$", (EXTENSION / entry).read_text("utf-8"))
    named = said[1].split(", ") if said else []
    assert own or named or entry == "privileges.sql"
    assert [name for name in named if not (tests / name).exists()] == []


@pytest.mark.parametrize("path", on_demand(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_each_file_installed_on_demand_has_such_a_test_too(path: Path) -> None:
    own = list((ROOT / "tests" / "sql" / path.parent.name).glob(f"{path.stem}.*"))
    said = re.search(r"(?m)\bTests(?: \(.+\))?: (.+)\.$", path.read_text("utf-8"))
    named = said[1].split(", ") if said else []
    assert own or named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_what_a_whole_server_shares_has_a_name_of_its_own() -> None:
    """Several files run at once on a server, each in its own database."""
    shared: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "tests" / "sql").rglob("*.*"):
        for found in SHARED.findall(path.read_text("utf-8")):
            shared[found].add(path.name.removesuffix(".out").removesuffix(".spec"))
    assert len(shared) > 20
    assert {name: paths for name, paths in shared.items() if len(paths) > 1} == {}


def test_how_it_works_names_every_table(conn: Connection) -> None:
    text = (ROOT / "docs" / "how-it-works.md").read_text("utf-8")
    relations = conn.execute(
        "select c.relname from pg_class c where c.relnamespace = 'queue'::regnamespace"
        " and c.relkind in ('r', 'v')"
    ).fetchall()
    assert not [name for (name,) in relations if not re.search(rf"`{name}`", text)]


def test_how_it_works_names_no_strange_file() -> None:
    text = (ROOT / "docs" / "how-it-works.md").read_text("utf-8")
    known = {entry.removesuffix(".sql") for entry in files()}
    found = re.findall(r"`((?:base|defer|recur|admit|work|operate|inspect)/\w+)(?:\.sql)?`", text)
    assert set(found) <= known


def test_the_glossary_is_in_order() -> None:
    text = (ROOT / "docs" / "how-it-works.md").read_text("utf-8").partition("## Glossary")[2]
    words = re.findall(r"(?m)^\| ([^|`]+) \| [^|]+ \| `", text.partition("\n## ")[0])
    assert len(words) > 50
    assert words == sorted(words, key=lambda word: word.lower().replace(",", ""))
