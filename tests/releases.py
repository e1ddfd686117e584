"""Releases for the tests: this one, the next, and the one after that.

The second is this tree with one of each kind of change: a changed function, a new public one, one
that is gone, a new column, index, table and view, a changed default, view and storage parameter.
The third changes nothing but its number.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import psycopg

from support import ROOT

SECOND_RELEASE = Path(__file__).parent / "second_release.sql"

NEW_FUNCTION = """\
-- Notes: a function of the second release.

create or replace function queue.note_of(id bigint)
returns text language plpgsql stable parallel safe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  if to_regclass('queue.installation') is null then
    perform queue._check_installed();
  end if;
  return (select l.note from queue.log l where l.id = note_of.id);
end $$;
comment on function queue.note_of(bigint) is 'The note on a job.';
"""


def load_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pgdefer_build", ROOT / "extension" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def replaced(source: Path, pattern: str, replacement: str) -> None:
    """Change the sources at the only place that matches."""
    total = 0
    for path in source.rglob("*.sql"):
        if "releases" in path.relative_to(source).parts:
            continue
        text, count = re.subn(
            pattern, lambda _: replacement, path.read_text("utf-8"), flags=re.DOTALL
        )
        total += count
        if count:
            path.write_text(text, "utf-8")
    assert total == 1, (pattern, total)


def second_step(tables: Path) -> str:
    """Return the step's text; the views with a new column are only in tables/."""
    text = SECOND_RELEASE.read_text("utf-8")
    build = load_build()
    for name in ("job", "job_now", "all_jobs", "jobs"):
        found = [
            re.search(
                rf"create view queue\.{name} as\n.*?;\n",
                build.read(tables.parent, path.relative_to(tables.parent).as_posix()),
                re.DOTALL,
            )
            for path in tables.rglob("*.sql")
        ]
        view = next(each for each in found if each)
        text += view[0].replace("create view", "create or replace view")
    return text


class Releases:
    """The scripts of three releases in a folder that servers can read."""

    def __init__(self, folder: Path) -> None:
        build = load_build()
        self.first = build.version()
        major, minor, _ = self.first.split(".")
        self.second = f"{major}.{int(minor) + 1}.0"
        self.third = f"{major}.{int(minor) + 2}.0"
        self.folder = folder
        source = folder / "source"
        shutil.copytree(ROOT / "extension", source)
        (source / "upgrades").mkdir(exist_ok=True)
        first = build.freeze(source, self.first, force=True)

        tables = source / "tables"
        replaced(source, r"(?<=  job_options queue.job_options,\n)(?=  constraint log_pkey)",
                 "  note text not null default '',\n")  # fmt: skip
        replaced(source, r"(?<=\n)(?=create index log_xid_idx)",
                 "create index log_note_idx on queue.log (note, id) where note <> '';\n")  # fmt: skip
        replaced(source, r"fillfactor = 70", "fillfactor = 60")
        replaced(source, r"created_at timestamptz not null,",
                 "created_at timestamptz not null default now(),")  # fmt: skip
        replaced(source, r"s\.error, s\.tag\nfrom queue\.job j",
                 "s.error, s.tag, j.note\nfrom queue.job j")  # fmt: skip
        replaced(source, r"\) as options\nfrom queue\.job_now j",
                 ") as options, j.note\nfrom queue.job_now j")  # fmt: skip
        replaced(source, r"j\.options\nfrom queue\.all_jobs j",
                 "j.options, j.note\nfrom queue.all_jobs j")  # fmt: skip
        replaced(source, r"\(l\.job_options\)\.size\n", "(l.job_options).size, l.note\n")
        step = second_step(tables)
        remarks = re.search(
            r"create table queue\.remark .*?'Remarks on jobs\.';\n", step, re.DOTALL
        )
        assert remarks is not None
        (tables / "second.sql").write_text(remarks[0], "utf-8")
        replaced(source,
                 r"\n-- Raises: 22023\.\ncreate or replace function queue\.autoscale_hint\(.*?"
                 r"comment on function queue\.autoscale_hint\(.*?';\n", "")  # fmt: skip
        replaced(source, r"'Does everything that is due:", "'Does all that is due:")
        (source / "inspect" / "note.sql").write_text(NEW_FUNCTION, "utf-8")
        manifest = source / "manifest"
        entries = manifest.read_text("utf-8").replace(
            "privileges.sql", "inspect/note.sql\nprivileges.sql"
        )
        last = re.findall(r"(?m)^tables/.*\n", entries)[-1]
        manifest.write_text(entries.replace(last, f"{last}tables/second.sql\n"), "utf-8")
        replaced(source / "base", r"(?<=[\s{])autoscale_hint(?=, get, graph, )", "note_of")
        replaced(source / "base", r"(?<=\n)    \('schedule_runs', .*?\n",
                 "    ('schedule_runs', '{operator,reader}', false),\n"
                 "    ('remarks', '{operator,reader}', false),\n")  # fmt: skip
        (source / "upgrades" / f"pgdefer--{self.first}--{self.second}.sql").write_text(step)
        second = build.freeze(source, self.second)
        self._second_files = build.render(source, self.second)

        (source / "upgrades" / f"pgdefer--{self.second}--{self.third}.sql").write_text("")
        build.build(source, folder / "build", self.third)
        for path in (first, second):
            shutil.copy(path, folder / "build" / "extension")
        name = f"pgdefer--{self.first}--{self.second}.sql"
        (folder / "build" / "extension" / name).write_text(self._second_files[name])
        self.plain = {
            self.first: build.as_plain(
                first.read_text("utf-8").replace(build.EXTENSION_GUARD, build.PLAIN_GUARD)
            ),
            self.second: self._second_files["pgdefer.sql"],
            self.third: (folder / "build" / "pgdefer.sql").read_text("utf-8"),
        }

    def install(self, connection: psycopg.Connection, form: str, version: str) -> None:
        """Install a release, or upgrade to it."""
        if form == "plain":
            connection.execute(self.plain[version].encode())
            return
        connection.execute(
            f"set extension_control_path = '{self.folder / 'build'}:$system'".encode()
        )
        row = connection.execute("select from pg_extension where extname = 'pgdefer'").fetchone()
        if row is None:
            connection.execute(f"create extension pgdefer version '{version}'".encode())
            connection.execute("select queue.install()")
        else:
            connection.execute(f"alter extension pgdefer update to '{version}'".encode())
            connection.execute("select queue.migrate()")


# All objects of an installation, as rows of text: kind, name, definition.
CATALOG = """
with acls as (
  select x.what, x.id, string_agg(format('%s/%s/%s/%s', case a.grantee when 0 then 'public'
      else a.grantee::regrole::text end, a.privilege_type, a.is_grantable, a.grantor::regrole),
      ' ' order by a.grantee::regrole::text, a.privilege_type) as acl
  from (
    select 'f' as what, p.oid as id, coalesce(p.proacl, acldefault('f'::"char", p.proowner)) as acl
    from pg_proc p where p.pronamespace = 'queue'::regnamespace
    union all
    select 'r', c.oid, coalesce(c.relacl, acldefault((case c.relkind when 'S' then 's' else 'r' end)::"char", c.relowner))
    from pg_class c where c.relnamespace = 'queue'::regnamespace and c.relkind in ('r', 'v', 'S')
    union all
    select 'n', n.oid, n.nspacl from pg_namespace n where n.nspname = 'queue') x
  left join lateral aclexplode(x.acl) a on true
  group by x.what, x.id)
select 'function' as what, p.oid::regprocedure::text as name,
  concat_ws(e'\\n', pg_get_functiondef(p.oid), p.provolatile, p.proparallel, p.proleakproof, p.procost, p.prorows,
    p.proowner::regrole, obj_description(p.oid, 'pg_proc'), (select a.acl from acls a where a.what = 'f' and a.id = p.oid)) as text
from pg_proc p where p.pronamespace = 'queue'::regnamespace
union all
select 'relation', c.oid::regclass::text,
  concat_ws(e'\\n', c.relkind, c.relpersistence, c.relreplident, c.relrowsecurity, c.relowner::regrole, array_to_string(array(select unnest(c.reloptions) order by 1), ','),
    obj_description(c.oid, 'pg_class'), case when c.relkind = 'v' then pg_get_viewdef(c.oid) end, (select a.acl from acls a where a.what = 'r' and a.id = c.oid))
from pg_class c where c.relnamespace = 'queue'::regnamespace and c.relkind in ('r', 'v', 'S')
union all
select 'column', format('%s.%s', a.attrelid::regclass, a.attname),
  concat_ws(e'\\n', rank() over (partition by a.attrelid order by a.attnum), format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity, a.attgenerated,
    a.attstorage, a.attcompression, a.attcollation::regcollation, a.attstattarget, pg_get_expr(d.adbin, d.adrelid), col_description(a.attrelid, a.attnum), a.attacl::text)
from pg_attribute a join pg_class c on c.oid = a.attrelid left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
where c.relnamespace = 'queue'::regnamespace and c.relkind in ('r', 'v') and a.attnum > 0 and not a.attisdropped
union all
select 'constraint', format('%s.%s', n.conrelid::regclass, n.conname), concat_ws(e'\\n', pg_get_constraintdef(n.oid), n.convalidated, obj_description(n.oid, 'pg_constraint'))
from pg_constraint n where n.connamespace = 'queue'::regnamespace
union all
select 'index', i.indexrelid::regclass::text,
  concat_ws(e'\\n', pg_get_indexdef(i.indexrelid), i.indisvalid, i.indisready, i.indislive, i.indisreplident, i.indisclustered, obj_description(i.indexrelid, 'pg_class'))
from pg_index i join pg_class c on c.oid = i.indexrelid where c.relnamespace = 'queue'::regnamespace
union all
select 'sequence', s.seqrelid::regclass::text,
  concat_ws(' ', s.seqtypid::regtype, s.seqstart, s.seqincrement, s.seqmin, s.seqmax, s.seqcache, s.seqcycle,
    (select d.refobjid::regclass from pg_depend d where d.classid = 'pg_class'::regclass and d.objid = s.seqrelid and d.deptype in ('a', 'i')))
from pg_sequence s join pg_class c on c.oid = s.seqrelid where c.relnamespace = 'queue'::regnamespace
union all
select 'trigger', t.tgname, pg_get_triggerdef(t.oid) from pg_trigger t join pg_class c on c.oid = t.tgrelid where c.relnamespace = 'queue'::regnamespace and not t.tgisinternal
union all
select 'rule', r.rulename || ' on ' || r.ev_class::regclass, pg_get_ruledef(r.oid) from pg_rewrite r join pg_class c on c.oid = r.ev_class where c.relnamespace = 'queue'::regnamespace
union all
select 'statistics', s.stxname, pg_get_statisticsobjdef(s.oid) from pg_statistic_ext s where s.stxnamespace = 'queue'::regnamespace
union all
select 'type', t.oid::regtype::text, t.typtype::text from pg_type t where t.typnamespace = 'queue'::regnamespace
union all
select 'schema', 'queue', concat_ws(e'\\n', n.nspowner::regrole, obj_description(n.oid, 'pg_namespace'), a.acl)
from pg_namespace n join acls a on a.what = 'n' and a.id = n.oid
union all
select 'member', pg_describe_object(d.classid, d.objid, 0), x.extversion
from pg_depend d join pg_extension x on x.oid = d.refobjid
where d.refclassid = 'pg_extension'::regclass and d.deptype = 'e' and x.extname = 'pgdefer'
union all
select 'default privileges', d.defaclrole::regrole::text, d.defaclacl::text from pg_default_acl d where d.defaclnamespace = 'queue'::regnamespace
order by 1, 2
"""


def catalog(connection: psycopg.Connection) -> dict[tuple[str, str], str]:
    return {(row[0], row[1]): row[2] for row in connection.execute(CATALOG)}


def difference(
    one: dict[tuple[str, str], str], other: dict[tuple[str, str], str]
) -> dict[tuple[str, str], tuple[str | None, str | None]]:
    """Return the differences of two catalogs: an empty dict if there are none."""
    return {
        key: (one.get(key), other.get(key))
        for key in sorted(one.keys() | other.keys())
        if one.get(key) != other.get(key)
    }
