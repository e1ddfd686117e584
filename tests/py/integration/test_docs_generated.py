"""The generated pages are current, and every error has its causes and its cure."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType

import pytest

import pgdefer
from pgdefer.errors import SQLSTATES
from support import ROOT

pytestmark = pytest.mark.client
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generated() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generated", DOCS / "generated.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11),
    reason="each version of Python writes signatures in its own way",
)
def test_the_python_reference_is_current(generated: ModuleType) -> None:
    page = (DOCS / "python-reference.md").read_text("utf-8")
    assert page == generated.python_reference(), "run `make docs`"


def test_the_command_line_is_current(generated: ModuleType) -> None:
    page = (DOCS / "command-line.md").read_text("utf-8")
    assert page == generated.command_line(), "run `make docs`"


def test_the_references_list_every_name_and_command(generated: ModuleType) -> None:
    headings = re.findall(r"^### pgdefer\.(\w+)$", generated.python_reference(), re.MULTILINE)
    assert sorted(headings) == sorted(pgdefer.__all__)
    commands = re.findall(r"^## (pgdefer.*)$", generated.command_line(), re.MULTILINE)
    assert len(commands) == len(set(commands))
    assert {"pgdefer", "pgdefer worker", "pgdefer job steps", "pgdefer db health"} <= set(commands)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (None, []),
        ("One.\n\n    code()\n\nTwo.", ["One.", "", "```python", "code()", "", "```", "", "Two."]),
        ("1\n\n    a\n\n    b\n2", ["1", "", "```python", "a", "", "b", "```", "", "2"]),
    ],
)
def test_code_in_docstrings_is_code(
    generated: ModuleType, text: str | None, lines: list[str]
) -> None:
    def documented() -> None: ...

    documented.__doc__ = text
    assert list(generated.docstring(documented)) == lines


def test_every_error_has_its_cure() -> None:
    text = (DOCS / "errors.md").read_text("utf-8")
    codes = re.findall(r"^### (.*):", text, re.MULTILINE)
    assert set(SQLSTATES) <= {code for heading in codes for code in heading.split(", ")}
    for path in (ROOT / "extension").glob("[a-z]*/*.sql"):
        if path.parent.name != "releases":
            raised = re.findall(r"errcode = '(QJ\w+)'", path.read_text("utf-8"))
            assert set(raised) <= SQLSTATES.keys(), path
    errors = [
        name
        for name in pgdefer.__all__
        if isinstance(kind := getattr(pgdefer, name), type)
        and issubclass(kind, BaseException)
        and kind is not pgdefer.PgDeferError
    ]
    assert not [name for name in errors if f"`{name}`" not in text]
    # Each section says the name in Python of its code.
    for code, kind in SQLSTATES.items():
        (section,) = re.findall(rf"^### [^\n]*{code}.*?(?=^##)", text, re.MULTILINE | re.DOTALL)
        assert f"`{kind.__name__}`" in section
