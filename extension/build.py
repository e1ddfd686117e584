"""Assembles extension/ into build/: the extension's files, and the plain file for psql -f.

The manifest lists the topic files of sql/ in order. At its line `@tables` goes the function
queue._create_tables(), whose body is the plain DDL of tables/ in the order of the files' names, so
that the extension holds code only. `@VERSION@` becomes the version that pyproject.toml states.
"""

import os
import re
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BUILD = ROOT / "build"

# Whoever owns the schema can put functions of his own beside ours, which then run with our rights:
# so the owner must be the installer, or a role he belongs to. A superuser belongs to none.
GUARD = """\
do $pgdefer_guard$
declare
  v_owner oid := (
    select n.nspowner from pg_catalog.pg_namespace n
    where n.nspname operator(pg_catalog.=) 'queue');
  v_is_ours boolean := (
    select v_owner operator(pg_catalog.=) r.oid
      or (not r.rolsuper and pg_catalog.pg_has_role(r.oid, v_owner, 'USAGE'))
    from pg_catalog.pg_roles r where r.rolname operator(pg_catalog.=) current_user);
begin
  if not v_is_ours then
    raise exception using
      errcode = '42501',
      message = 'schema queue belongs to another role',
      detail = pg_catalog.format(
        'It belongs to %s, and this is %s.', pg_catalog.pg_get_userbyid(v_owner), current_user),
      hint = 'Install as its owner (SET ROLE), or into another database.';
  end if;
end
$pgdefer_guard$;
"""

TABLES_HEAD = """\
create or replace function queue._create_tables()
returns void
language plpgsql
volatile
parallel unsafe
security invoker
as $pgdefer_tables$
begin
"""

TABLES_TAIL = """\
end
$pgdefer_tables$;
"""


class BuildError(Exception):
    """The sources do not fit together; the text says where."""


def version() -> str:
    """Return the project's version from its single source, pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        found = tomllib.load(file)["project"]["version"]
    return str(found)


def manifest(source: Path) -> list[str]:
    """Return the manifest's entries: `sql/NN_topic.sql` in order, and `@tables` once."""
    path = source / "manifest"
    if not path.exists():
        raise BuildError(f"{path} is missing")
    lines = (line.partition("#")[0].strip() for line in path.read_text("utf-8").splitlines())
    entries = [line for line in lines if line]
    for entry in entries:
        if entry != "@tables" and not re.fullmatch(r"sql/[\w.]+\.sql", entry):
            raise BuildError(f"{path}: cannot read the entry {entry!r}")
        if entries.count(entry) > 1:
            raise BuildError(f"{path} names {entry} twice")
    if "@tables" not in entries:
        raise BuildError(f"{path} lacks the line @tables")
    for file in sorted((source / "sql").glob("*.sql")):
        if f"sql/{file.name}" not in entries:
            raise BuildError(f"{path} does not list sql/{file.name}")
    return entries


def read(source: Path, entry: str) -> str:
    """Return one topic file's text, refusing what would break one of the two forms."""
    path = source / entry
    if not path.exists():
        raise BuildError(f"{path} is listed in the manifest but missing")
    text = path.read_text("utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("\\"):
            raise BuildError(f"{path}:{number}: psql commands do not run through drivers")
        if "$pgdefer_tables$" in line:
            raise BuildError(f"{path}:{number}: $pgdefer_tables$ is the build's own")
    return text.rstrip() + "\n"


def code(source: Path) -> str:
    """Return the code that both forms share."""
    parts = []
    for entry in manifest(source):
        if entry == "@tables":
            tables = [f"tables/{path.name}" for path in sorted((source / "tables").glob("*.sql"))]
            body = "\n".join(f"-- {name}\n{read(source, name)}" for name in tables)
            parts.append(f"{TABLES_HEAD}{body}{TABLES_TAIL}")
        else:
            parts.append(f"-- {entry}\n{read(source, entry)}")
    return "\n".join(parts)


def render(source: Path) -> dict[str, str]:
    """Return every file of build/ by name."""
    number = version()
    shared = code(source)
    files = {
        f"pgdefer--{number}.sql": (
            f"-- pgdefer {number}, the extension: code only. Next: select queue.install().\n"
            '\\echo Use "CREATE EXTENSION pgdefer" to load this file. \\quit\n\n'
            f"{GUARD}\n{shared}"
        ),
        "pgdefer.sql": (
            f"-- pgdefer {number}, for psql -f where no extension may be installed. Running it\n"
            "-- again upgrades. One transaction: all of it or nothing.\n\n"
            "begin;\n\n"
            "set local check_function_bodies = off;\n"
            "set local client_min_messages = warning;\n\n"
            f"create schema if not exists queue;\n\n{GUARD}\n{shared}\n"
            "select queue.install();\n\ncommit;\n"
        ),
        "pgdefer.control": (source / "pgdefer.control").read_text("utf-8"),
    }
    for path in sorted((source / "upgrades").glob("pgdefer--*--*.sql")):
        files[path.name] = path.read_text("utf-8")
    return {name: text.replace("@VERSION@", number) for name, text in files.items()}


def build(source: Path = HERE, target: Path = BUILD) -> list[Path]:
    """Write build/, replacing what changed, and return its files.

    PostgreSQL 18's extension_control_path looks into a folder named extension below each of its
    entries, so the extension's files are in target/extension as well.
    """
    wanted: dict[Path, str] = {}
    for name, text in render(source).items():
        wanted[target / name] = text
        if name != "pgdefer.sql":
            wanted[target / "extension" / name] = text
    (target / "extension").mkdir(parents=True, exist_ok=True)
    for folder in (target, target / "extension"):
        for stale in folder.glob("pgdefer*"):
            if stale not in wanted:
                stale.unlink()
    for path, text in wanted.items():
        if path.exists() and path.read_text("utf-8") == text:
            continue
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(text, "utf-8")
        unfinished.replace(path)
    return sorted(wanted)


def main() -> int:
    """Build from the folder given, or from this one, into the second, or build/."""
    arguments = [Path(argument).resolve() for argument in sys.argv[1:]]
    try:
        files = build(*arguments)
    except BuildError as error:
        print(f"build: {error}", file=sys.stderr)
        return 1
    for path in files:
        print(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
