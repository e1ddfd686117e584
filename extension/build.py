"""Assembles extension/ into build/: the extension's files, and the plain file for psql -f.

queue.migrate (base/migrate.sql) carries out the steps of an upgrade that this makes.

    extension/build.py [SOURCE [TARGET [VERSION]]]
    extension/build.py --freeze [--force]

The manifest lists the SQL files in order. The files of tables/ follow one another in it. In their
place the build puts the function queue._create_tables(), whose body is their plain DDL, so the
extension contains only code. The build replaces `@VERSION@` by the version in pyproject.toml, and
`{{name}}` by its value in the file `macros`: a number, with its name in a comment, or a text.

upgrades/pgdefer--A--B.sql is the step from one release to the next: the changes other than the
replacement of A's functions by B's. Its sections, all of them optional:

    -- @code           before the functions are replaced, in both forms: drop function if exists ...
    -- @concurrently   indexes of large tables: create index concurrently NAME on queue.TABLE ...;
                    built once the tables are migrated
    -- @tables         all other DDL: becomes the body of one branch of queue._migrate_tables()

From the steps the build writes an upgrade script from each earlier release directly to this one.
--freeze writes the extension's script to releases/, as released; it never changes again.
"""

import functools
import itertools
import operator
import os
import re
import sys
import textwrap
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BUILD = ROOT / "build"

# A role that owns the schema, or may create objects in it, can add functions that then run with the
# queue's rights. So the owner must be the installer, or a role that the installer belongs to. No
# other role may create objects there, or own any. A superuser counts as a member of no role.
GUARD = """\
do $pgdefer_guard$
declare
  v_owner pg_catalog.oid := (
    select n.nspowner from pg_catalog.pg_namespace n
    where n.nspname operator(pg_catalog.=) 'queue');
  v_schema pg_catalog.oid := 'queue'::pg_catalog.regnamespace;
  v_others pg_catalog.text;
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
  select pg_catalog.string_agg(x.name, ', ' order by x.name) into v_others
  from (
    select distinct case x.role when 0 then 'PUBLIC' else pg_catalog.pg_get_userbyid(x.role) end
    from (
      select a.grantee
      from pg_catalog.pg_namespace n
      cross join lateral pg_catalog.aclexplode(n.nspacl) a
      where n.nspname operator(pg_catalog.=) 'queue'
        and a.privilege_type operator(pg_catalog.=) 'CREATE'
      union all
      select p.proowner from pg_catalog.pg_proc p
      where p.pronamespace operator(pg_catalog.=) v_schema
      union all
      select c.relowner from pg_catalog.pg_class c
      where c.relnamespace operator(pg_catalog.=) v_schema
      union all
      select t.typowner from pg_catalog.pg_type t
      where t.typnamespace operator(pg_catalog.=) v_schema
      union all
      select o.oprowner from pg_catalog.pg_operator o
      where o.oprnamespace operator(pg_catalog.=) v_schema) x (role)
    where x.role operator(pg_catalog.=) 0 or not pg_catalog.pg_has_role(x.role, v_owner, 'USAGE')
    ) x (name);
  if v_others is not null then
    raise exception using
      errcode = '42501',
      message = 'others may create in schema queue, or have objects there',
      detail = pg_catalog.format('Roles: %s.', v_others),
      hint = 'Their functions could run with the rights of this role. REVOKE CREATE ON SCHEMA queue'
        ' FROM them, drop their objects there, and install again.';
  end if;
end
$pgdefer_guard$;
"""

# The two forms do not mix: CREATE EXTENSION does not take over existing functions.
EXTENSION_GUARD = """\
do $pgdefer_guard$
begin
  if exists (
    select from pg_catalog.pg_proc p
    where p.pronamespace operator(pg_catalog.=) 'queue'::pg_catalog.regnamespace
      and p.proname operator(pg_catalog.=) 'install'
      and not exists (
        select from pg_catalog.pg_depend d
        where d.classid operator(pg_catalog.=) 'pg_catalog.pg_proc'::pg_catalog.regclass
          and d.objid operator(pg_catalog.=) p.oid and d.deptype operator(pg_catalog.=) 'e'))
  then
    raise exception using
      errcode = '55000',
      message = 'pgdefer is installed in the plain form here',
      hint = 'Run its newer pgdefer.sql to upgrade it. To have the extension in its place, drop the'
        ' functions in schema queue first (docs/installing.md); tables and jobs stay.';
  end if;
end
$pgdefer_guard$;
"""
# Two sessions may run the plain file at once. The second waits here for the end of the first: for a
# new schema's name, or else for the lock that a comment takes, which only the schema's owner gets.
PLAIN_SCHEMA = """\
do $pgdefer_schema$
begin
  -- also the owner of a schema that is there may lack the right to create one
  if pg_catalog.to_regnamespace('queue') is null then
    create schema if not exists queue;
  end if;
exception when unique_violation then
  null;  -- the other session has made it
end
$pgdefer_schema$;
"""
PLAIN_GUARD = """\
do $pgdefer_guard$
begin
  execute pg_catalog.format('comment on schema queue is %L',
    pg_catalog.obj_description('queue'::pg_catalog.regnamespace, 'pg_namespace'));
  if exists (
    select from pg_catalog.pg_extension e where e.extname operator(pg_catalog.=) 'pgdefer')
  then
    raise exception using
      errcode = '55000',
      message = 'pgdefer is installed as an extension here',
      hint = 'Upgrade it by ALTER EXTENSION pgdefer UPDATE and SELECT queue.migrate(). To have the'
        ' plain form in its place, DROP EXTENSION pgdefer first; tables and jobs stay.';
  end if;
end
$pgdefer_guard$;
"""

# Where the guards of a script end, and what stands for the code that follows them.
GUARD_END = "end\n$pgdefer_guard$;\n"
CODE_MARK = "-- @CODE@"

# Folders whose files are no part of the extension; those of ON_DEMAND are installed on demand.
ON_DEMAND = ("cluster", "plproxy", "citus")
APART = ("releases/", "upgrades/", *(f"{name}/" for name in ON_DEMAND))

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

VERSIONS = """\
-- The releases whose tables can be migrated, oldest first, then this one.
create or replace function queue._versions()
returns text[]
language plpgsql
immutable
parallel safe
security invoker
as $$
begin
  return {versions};
end $$;
"""

RELATIONS = """\
-- The tables, views and sequences that a release makes. Others in the schema are an application's.
create or replace function queue._own_relations()
returns text[]
language plpgsql
immutable
parallel safe
security invoker
as $$
begin
  return array[
{names}]::text[];
end $$;
"""

INDEXES = """\
-- The indexes of large tables that the step from a release adds.
create or replace function queue._step_indexes(p_from text)
returns text[]
language plpgsql
immutable
parallel safe
security invoker
as $$
begin
  return case p_from
{branches}    else '{{}}'::text[] end;
end $$;
"""

MIGRATE_HEAD = """\
-- Migrates the tables to the next release, and returns that; NULL if there is no further step.
create or replace function queue._migrate_tables(p_from text)
returns text
language plpgsql
volatile
parallel unsafe
security invoker
as $pgdefer_tables$
begin
"""

SECTIONS = ("code", "concurrently", "tables")
RELATION = re.compile(r"create (?:table|view|sequence) (?:if not exists )?queue\.([a-z_]\w*)")
INDEX = re.compile(
    r"create (?:unique )?index concurrently (?P<name>[a-z_]\w*)\s+on queue\.(?P<table>[a-z_]\w*)\b"
)


class BuildError(Exception):
    """The sources contradict each other; the text says where."""


class Step:
    """The step from one release to the next: upgrades/pgdefer--A--B.sql."""

    def __init__(self, path: Path) -> None:
        _, self.before, self.after = path.stem.split("--")
        self.path = path
        parts = re.split(r"(?m)^-- @(\w+).*\n", path.read_text("utf-8"))
        self._sections = dict(zip(parts[1::2], parts[2::2], strict=True))
        unknown = sorted(set(self._sections) - set(SECTIONS))
        if unknown or len(parts[1::2]) != len(self._sections):
            raise BuildError(f"{path}: each section once, of {', '.join(SECTIONS)}")
        if re.sub(r"(?m)^--.*$", "", parts[0]).strip():
            raise BuildError(f"{path}: only comments may come before the first section")
        for line in path.read_text("utf-8").splitlines():
            if line.startswith("\\") or "$pgdefer_tables$" in line:
                raise BuildError(f"{path}: may not contain psql commands or the build's quotes")
        for statement in self.indexes:
            if not INDEX.match(statement):
                raise BuildError(
                    f"{path}: not of the form create index concurrently NAME on queue.TABLE:"
                    f" {statement}"
                )

    def section(self, name: str) -> str:
        """Return a section's text, empty if the step has none."""
        return self._sections.get(name, "").strip()

    @property
    def indexes(self) -> list[str]:
        """Return the statements of the section `concurrently`."""
        text = re.sub(r"(?m)^\s*--.*$", "", self.section("concurrently"))
        return [" ".join(part.split()) for part in text.split(";") if part.strip()]


def version() -> str:
    """Return the project's version from its single source, pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        found = tomllib.load(file)["project"]["version"]
    return str(found)


def numbers(text: str) -> list[int]:
    """Return a version's numbers, by which versions are ordered."""
    return [int(part) for part in text.split(".")]


def steps(source: Path, number: str) -> list[Step]:
    """Return the steps that lead to a version, in order. They must form one chain."""
    found = [Step(path) for path in (source / "upgrades").glob("pgdefer--*--*.sql")]
    chain = sorted(found, key=lambda step: numbers(step.before))
    ends = [*(step.before for step in chain), number][1:]
    for step, end in zip(chain, ends, strict=False):
        if step.after != end or numbers(step.before) >= numbers(end):
            raise BuildError(f"{step.path}: the steps form no chain that ends with {number}")
    for release in (source / "releases").glob("pgdefer--*.sql"):
        released = release.stem.partition("--")[2]
        if released != number and released not in [step.before for step in chain]:
            raise BuildError(f"no step in upgrades/ leads from the release {released} to {number}")
    return chain


def manifest(source: Path) -> list[str]:
    """Return the manifest's entries in order: `folder/topic.sql`, those of tables/ together."""
    path = source / "manifest"
    if not path.exists():
        raise BuildError(f"{path} is missing")
    lines = (line.partition("#")[0].strip() for line in path.read_text("utf-8").splitlines())
    entries = [line for line in lines if line]
    for entry in entries:
        if not re.fullmatch(r"(\w+/)*\w+\.sql", entry):
            raise BuildError(f"{path}: cannot read the entry {entry!r}")
        if entries.count(entry) > 1:
            raise BuildError(f"{path} names {entry} twice")
    places = [n for n, entry in enumerate(entries) if entry.startswith("tables/")]
    if not places or places[-1] - places[0] >= len(places):
        raise BuildError(f"{path} must name the files of tables/, one after another")
    for file in sorted(source.rglob("*.sql")):
        entry = file.relative_to(source).as_posix()
        if entry not in entries and not entry.startswith(APART):
            raise BuildError(f"{path} does not list {entry}")
    return entries


def macros(source: Path) -> dict[str, str]:
    """Return the value of each `{{name}}`, from lines `name = value` and `name := text`.

    A value is a number, the two numbers of an advisory lock, or names of bits with | between them.
    A text goes on in indented lines, and may contain texts above it.
    """
    path = source / "macros"
    found: dict[str, str] = {}
    bits: dict[str, int] = {}
    name = ""
    for line in path.read_text("utf-8").splitlines() if path.exists() else []:
        if line.startswith("  ") and name in found:
            found[name] += "\n" + put_in(path, line, found)
            continue
        name, is_text, value = line.partition(" := ")
        if not is_text:
            statement = line.partition("#")[0]
            name, sign, value = statement.partition(" = ")
            if not sign:
                if statement.strip():
                    raise BuildError(f"{path}: cannot read {line!r}")
                continue
        if name in found:
            raise BuildError(f"{path} names {name} twice")
        if is_text:
            found[name] = put_in(path, value, found)
            continue
        value = value.strip()
        if "," not in value:
            try:
                bits[name] = number_of(value, bits)
            except KeyError as error:
                raise BuildError(f"{path}: {name} names {error}, which is not a bit") from None
        found[name] = f"{bits.get(name, value)}/* {name} */"
    return found


def number_of(value: str, bits: dict[str, int]) -> int:
    """Return the value of a number, or of names of bits with | between them."""
    if re.fullmatch(r"-?\d+", value):
        return int(value)
    return functools.reduce(operator.or_, (bits[part.strip()] for part in value.split("|")))


def read(source: Path, entry: str) -> str:
    """Return one file's text with its macros expanded; raise for text that would break a form."""
    path = source / entry
    if not path.exists():
        raise BuildError(f"{path} is listed in the manifest but missing")
    text = path.read_text("utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("\\"):
            raise BuildError(f"{path}:{number}: psql commands do not run through drivers")
        if "$pgdefer_tables$" in line:
            raise BuildError(f"{path}:{number}: $pgdefer_tables$ is the build's own")
        if "\\" in line.partition("--")[0]:
            raise BuildError(
                f"{path}:{number}: a backslash means something else where a session has"
                " standard_conforming_strings off: use chr(92), or [.] and the like in patterns"
            )
    return put_in(path, text.rstrip(), macros(source)) + "\n"


def put_in(path: Path, text: str, known: dict[str, str]) -> str:
    """Return the text with each `{{name}}` replaced by its value."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in known:
            raise BuildError(f"{path}: {found[0]} is not defined in the file macros")
        return known[found[1]]

    return re.sub(r"\{\{(\w+)\}\}", value, text)


def text_array(items: list[str]) -> str:
    """Return an expression in SQL for an array of texts."""
    return "array[" + ", ".join("'" + item.replace("'", "''") + "'" for item in items) + "]::text[]"


def own_relations(source: Path) -> str:
    """Return the function that names our relations: of every release, and those on demand."""
    names = {
        name for path in source.rglob("*.sql") for name in RELATION.findall(path.read_text("utf-8"))
    }
    lines = textwrap.wrap(", ".join(f"'{name}'" for name in sorted(names)), 104)
    return RELATIONS.format(names="\n".join(f"    {line}" for line in lines))


def migration(chain: list[Step], number: str) -> str:
    """Return the functions that know the steps between releases."""
    branches = "".join(
        f"    when '{step.before}' then {text_array(step.indexes)}\n"
        for step in chain
        if step.indexes
    )
    if branches:
        indexes = INDEXES.format(branches=branches)
    else:
        indexes = re.sub(r"case p_from\n.*?end;", "'{}'::text[];", INDEXES, flags=re.DOTALL)
    body = "".join(
        f"  if p_from = '{step.before}' then\n"
        f"{step.section('tables') or '    null;'}\n"
        f"    return '{step.after}';\n  end if;\n"
        for step in chain
    )
    known = text_array([step.before for step in chain] + [number])
    return (
        f"{VERSIONS.format(versions=known)}\n{indexes}\n{MIGRATE_HEAD}{body}  return null;\n"
        f"{TABLES_TAIL}"
    )


def code(source: Path, number: str) -> str:
    """Return the code common to both forms."""
    parts = []
    for is_table, entries in itertools.groupby(
        manifest(source), lambda entry: entry.startswith("tables/")
    ):
        texts = [f"-- {entry}\n{read(source, entry)}" for entry in entries]
        if is_table:
            body = "\n".join(texts)
            parts.append(f"{TABLES_HEAD}{body}{TABLES_TAIL}")
            parts.append(own_relations(source))
            parts.append(migration(steps(source, number), number))
        else:
            parts += texts
    return "\n".join(parts)


def dropped(chain: list[Step]) -> str:
    """Return the code of steps that runs before the functions are replaced."""
    texts = [f"-- {step.path.name}\n{step.section('code')}\n\n" for step in chain]
    return "".join(text for step, text in zip(chain, texts, strict=True) if step.section("code"))


def as_plain(script: str) -> str:
    """Return the plain file with the code of an extension's script."""
    first, _, rest = script.partition("\n")
    number = first.split()[2].rstrip(",")
    body = "\n".join(line for line in rest.splitlines() if not line.startswith("\\"))
    return (
        f"-- pgdefer {number}, for psql -f where no extension may be installed. Running it\n"
        "-- again upgrades. One transaction: all of it or nothing.\n\n"
        "begin;\n\n"
        "set local check_function_bodies = off;\n"
        "set local client_min_messages = warning;\n\n"
        f"{PLAIN_SCHEMA}\n{body.strip()}\n\n"
        "select queue.install();\n\ncommit;\n"
    )


def render(source: Path, number: str) -> dict[str, str]:
    """Return every file of build/ by name."""
    shared = code(source, number)
    chain = steps(source, number)
    script = (
        f"-- pgdefer {number}, the extension: code only. Next: select queue.install().\n"
        '\\echo Use "CREATE EXTENSION pgdefer" to load this file. \\quit\n\n'
    )
    files = {
        f"pgdefer--{number}.sql": f"{script}{GUARD}{EXTENSION_GUARD}\n{shared}",
        "pgdefer.sql": as_plain(f"{script}{GUARD}{PLAIN_GUARD}\n{dropped(chain)}{shared}"),
        "pgdefer.control": (source / "pgdefer.control").read_text("utf-8"),
    }
    for place, step in enumerate(chain):
        files[f"pgdefer--{step.before}--{number}.sql"] = (
            f"-- pgdefer {step.before} to {number}: code only. Next: select queue.migrate().\n"
            '\\echo Use "ALTER EXTENSION pgdefer UPDATE" to load this file. \\quit\n\n'
            f"{GUARD}\n{dropped(chain[place:])}{shared}"
        )
    return {name: text.replace("@VERSION@", number) for name, text in files.items()}


def without_code(script: str, plain: str) -> str:
    """Return the plain file with a mark in place of the code that the extension's script has too.

    A wheel carries this, and pgdefer.database.install puts the two together again.
    """
    _, _, shared = script.split(GUARD_END, 2)
    before, code, after = plain.partition(shared.strip())
    if not code:
        raise BuildError("the plain file does not contain the code of the extension's script")
    return f"{before}{CODE_MARK}{after}"


def freeze(source: Path = HERE, number: str | None = None, *, force: bool = False) -> Path:
    """Write the extension's script to releases/, as released. Raises rather than change one."""
    number = number or version()
    name = f"pgdefer--{number}.sql"
    path = source / "releases" / name
    text = render(source, number)[name]
    if path.exists() and path.read_text("utf-8") != text and not force:
        raise BuildError(f"{path} is frozen and differs: a change needs a new version")
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, "utf-8")
    return path


def build(source: Path = HERE, target: Path = BUILD, number: str | None = None) -> list[Path]:
    """Write build/, replacing changed files, and return its files.

    PostgreSQL 18's extension_control_path looks into a folder named extension below each of its
    entries, so the extension's files are in target/extension as well.
    """
    wanted: dict[Path, str] = {}
    for name, text in render(source, number or version()).items():
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
    """Build from the given folder, or this one, into the second, or build/; or freeze."""
    arguments = sys.argv[1:]
    try:
        if "--freeze" in arguments:
            files = [freeze(force="--force" in arguments)]
        else:
            source, target, number = [*arguments, None, None, None][:3]
            files = build(
                Path(source).resolve() if source else HERE,
                Path(target).resolve() if target else BUILD,
                number,
            )
    except BuildError as error:
        print(f"build: {error}", file=sys.stderr)
        return 1
    for path in files:
        print(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
