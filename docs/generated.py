"""Writes the references of the Python package, from its docstrings, and of the command line."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import typer.main

import pgdefer
import pgdefer.testing
from pgdefer.cli import cli

WIDTH = 100
PYTHON = """# Python: names, signatures, docstrings

`make docs` generates this page from the package's docstrings. [Python](python.md) explains the same
names by topic. A name that ends in `_async` is the asyncio version of the one without, and is
listed with it.
"""
COMMANDS = """# The command line

`make docs` generates this page from the command line's help. [Operating](operating.md) shows the
commands at work. Intervals are PostgreSQL's, such as `'5 minutes'`; a number without a unit means
seconds. Times are read and shown in the zone of `PGTZ`, `TZ` or the machine, or in the session's
if the server does not know that name. Those shown end with their offset from UTC.
"""


def python_reference() -> str:
    """Return the page of every public name."""
    names = {name: getattr(pgdefer, name) for name in pgdefer.__all__}
    errors = {n for n, o in names.items() if inspect.isclass(o) and issubclass(o, BaseException)}
    options = {n for n, o in names.items() if typing.is_typeddict(o)}
    classes = {n for n, o in names.items() if inspect.isclass(o)} - errors - options
    parts = [
        ("Classes", sorted(classes)),
        ("Functions and types", sorted(names.keys() - classes - errors - options)),
        ("Options", sorted(options)),
        ("Errors", sorted(errors)),
    ]
    lines = [PYTHON]
    for title, members in parts:
        lines += [f"## {title}", ""]
        for name in members:
            lines += [*entry(f"pgdefer.{name}", names[name]), ""]
    lines += ["## pgdefer.testing", "", *docstring(pgdefer.testing), ""]
    for name in sorted(pgdefer.testing.__all__):
        lines += [*entry(f"pgdefer.testing.{name}", getattr(pgdefer.testing, name)), ""]
    return "\n".join(lines).rstrip() + "\n"


def entry(name: str, thing: Any) -> Iterator[str]:
    """Yield a name's heading, signature, docstring and methods."""
    yield f"### {name}"
    yield ""
    if typing.is_typeddict(thing):
        yield from docstring(thing)
        yield ""
        yield ", ".join(f"`{key}`" for key in sorted(thing.__annotations__))
        return
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        yield f"`{without_modules(repr(thing))}`"
        return
    yield from code(name.rpartition(".")[2], [thing])
    yield from docstring(thing)
    if inspect.isclass(thing):
        yield from members(thing)


def members(kind: type) -> Iterator[str]:
    """Yield the public methods and properties that the package defines, inherited ones too."""
    found = {
        name: static
        for base in reversed(kind.__mro__)
        if base.__module__.startswith("pgdefer")
        for name, static in vars(base).items()
        if not name.startswith("_")
    }
    if any(isinstance(static, property) for static in found.values()):
        yield ""
    for name, static in sorted(found.items()):
        if isinstance(static, property):
            text = " ".join(docstring(static))
            yield f"- `{name}`" + (f": {text}" if text else "")
    for name, static in sorted(found.items()):
        if not callable(static) and not isinstance(static, classmethod | staticmethod):
            continue
        if name.endswith("_async") and name.removesuffix("_async") in found:
            continue
        twin = f"{name}_async" if f"{name}_async" in found else ""
        differs = bool(twin) and shape(getattr(kind, twin)) != shape(getattr(kind, name))
        yield ""
        yield f"#### {kind.__name__}.{name}"
        yield ""
        yield from code(name, [getattr(kind, name)], "" if differs else twin)
        yield from docstring(static)
        if differs:
            yield ""
            yield from code(twin, [getattr(kind, twin)], is_awaited=True)
            yield from docstring(found[twin])


def code(
    name: str, things: list[Any], twin: str = "", *, is_awaited: bool = False
) -> Iterator[str]:
    """Yield a signature as a block of code."""
    for thing in things:
        try:
            text = str(inspect.signature(thing))
        except ValueError:
            return
        text = re.sub(r"\((?:self|cls)(?:, )?", "(", without_modules(text), count=1)
        yield "```text"
        yield f"{'await ' if is_awaited else ''}{name}{text}"
        if twin:
            yield f"await {twin}(...)"
        yield "```"
        yield ""


def shape(routine: Any) -> list[tuple[str, Any, Any]]:
    """Return a routine's parameters: their names, kinds and defaults."""
    parameters = inspect.signature(routine).parameters.values()
    return [(each.name, each.kind, each.default) for each in parameters]


def without_modules(text: str) -> str:
    """Return a signature without modules and addresses, and as each Python version writes it."""
    text = re.sub(r"\b(?:pgdefer|collections|typing|datetime|psycopg)(?:\.\w+)*\.(?=\w)", "", text)
    return re.sub(r"<(?:function|object|class) '?([\w.]+)'?[^>]*>", r"\1", text).replace("'", "")


def docstring(thing: Any) -> Iterator[str]:
    """Yield the lines of a docstring, safe in Markdown."""
    text = inspect.cleandoc(getattr(thing, "__doc__", None) or "")
    # A dataclass without a docstring has its signature as one.
    if not isinstance(thing, ModuleType) and text.startswith(f"{getattr(thing, '__name__', '')}("):
        return
    fenced = False
    for line in text.splitlines():
        is_code = line.startswith("    ")
        if is_code and not fenced:
            yield "```python"
        elif fenced and line and not is_code:
            yield "```"
            yield ""
        fenced = is_code or (fenced and not line)
        yield line[4:] if is_code else line
    if fenced:
        yield "```"


def command_line() -> str:
    """Return the page of every command's help."""
    lines = [COMMANDS]
    program = typer.main.get_command(cli)
    for name, text in helps(program, "pgdefer", None):
        lines += [f"## {name}", "", "```text", text, "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def helps(command: Any, name: str, parent: Any) -> Iterator[tuple[str, str]]:
    """Yield the full name of a command and of those below it, each with its help."""
    context = command.context_class(
        command,
        info_name=name.rpartition(" ")[2],
        parent=parent,
        terminal_width=WIDTH,
        max_content_width=WIDTH,
        **command.context_settings,
    )
    lines = command.get_help(context).splitlines()
    yield name, "\n".join(line.rstrip() for line in lines)
    if hasattr(command, "commands"):
        for child, below in command.commands.items():
            if not below.hidden:
                yield from helps(below, f"{name} {child}", context)
