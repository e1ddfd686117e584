"""House rules for the Python code that no linter checks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import pgdefer
from pgdefer import errors
from pgdefer.cli import _base
from pgdefer.contrib.web import actions
from pgdefer.database import sql

PACKAGE = Path(pgdefer.__file__).parent
# Each command of cli and each page has its own SQL.
SOURCES = sorted(p for p in PACKAGE.rglob("*.py") if p.parent.name not in ("cli", "web"))
STATEMENT = re.compile(
    r"^\s*(select|insert|update|delete|with|call|listen|create|drop|alter|set|begin)\b",
    re.IGNORECASE,
)
# sql is the place for statements, move_in_sql for those on the tables of other queues; embedded
# creates servers, which have nothing to do with the queue.
OWN = {"sql.py", "move_in_sql.py", "embedded.py"}


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name not in OWN], ids=lambda p: p.name)
def test_statements_have_their_modules(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
    ]
    assert [t for t in texts if STATEMENT.match(t) and len(t.split()) > 2] == []


# The folders whose modules may have a test of their name. Elsewhere a name may say little: several
# folders have a module `results`, and unit/test_install.py is not about contrib/cluster/install.
NAMED = ("database", "tasks", "worker")
# Modules of these folders whose name is that of a test about something else.
OTHERS = ["worker/memory"]
MODULES = [
    path.relative_to(PACKAGE).with_suffix("").as_posix()
    for path in sorted(PACKAGE.rglob("*.py"))
    if not path.stem.startswith("__") and path.parent.name not in ("migrations", "versions")
]


@pytest.mark.parametrize("module", [module for module in MODULES if module != "_version"])
def test_each_module_has_a_test_of_its_name_or_says_which(module: str) -> None:
    """As each file of extension/ does."""
    room, _, name = module.rpartition("/")
    tests = Path(__file__).parents[1]
    doc = ast.get_docstring(ast.parse((PACKAGE / f"{module}.py").read_text("utf-8"))) or ""
    said = re.search(r"(?ms)^Tests: (.+?)\.$", doc)
    named = re.split(r",\s", said[1]) if said else []
    may_have_own = room in ("", *NAMED) and module not in OTHERS
    assert named or (may_have_own and list(tests.rglob(f"test_{name.removesuffix('_async')}.py")))
    assert [test for test in named if not (tests / test).exists()] == []


def test_statements_only_call_the_queue() -> None:
    statements = {
        name: value.text
        for name, value in vars(sql).items()
        if isinstance(value, sql.Statement) and not name.startswith("DEMO_")
    }
    allowed = {"HAS_EXTENSION", "CREATE_EXTENSION", "UPDATE_EXTENSION", "DROP_EXTENSION"}
    allowed |= {"AFTER_PLAIN_CODE", "AFTER_PLAIN_MESSAGES", "READ_COMMITTED"}
    allowed |= {"SET_STATEMENT_TIMEOUT", "HIDE_SENSITIVE", "UNDO", "STYLES", "SET_ZONE"}
    allowed |= {"MAY_HAVE_WRITTEN", "BOUND_WAITS"}
    allowed |= {"MAY_DUMP", "MAY_RESTORE"}  # before programs of PostgreSQL
    assert {n for n, text in statements.items() if " queue." not in text} == allowed


def test_every_error_of_the_contract_has_its_class() -> None:
    codes = [*(f"QJ00{n}" for n in range(1, 10)), "QJ090", "22023"]
    kinds = [errors.SQLSTATES[code] for code in codes]
    assert len(set(kinds)) == len(kinds)
    assert [kind.sqlstate for kind in kinds] == codes
    assert all(kind.__name__ in pgdefer.__all__ for kind in kinds)


def test_every_refusal_in_rows_has_its_words() -> None:
    functions = Path(__file__).parents[3] / "extension" / "operate"
    text = "".join(path.read_text("utf-8") for path in functions.glob("*.sql"))
    codes = set(re.findall(r"(?<!errcode = )'(QJ\d+)'", text))
    assert codes >= {"QJ001", "QJ009"}
    for table in (errors.REFUSALS, _base.REFUSALS, actions.REFUSALS):
        assert set(table) == codes
    assert {type(errors.refused(1, None, code)) for code in codes} == {
        errors.SQLSTATES[code] for code in codes
    }
    assert (
        str(errors.refused(1, "ready", "QJ999"))
        == "the call was refused (QJ999) (id: 1, state: ready)"
    )


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_records_about_a_job_have_its_fields(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("log."):
            about = {ast.unparse(argument).split(".")[-1] for argument in node.args}
            has_fields = "extra" in {keyword.arg for keyword in node.keywords}
            assert has_fields or not about & {"job", "claim"}, f"{path.name}:{node.lineno}"
