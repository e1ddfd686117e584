-- House rules, read from the catalog.

select plan(32);

create temp view functions as
  select p.oid, p.proname as name, p.oid::regprocedure::text as signature, starts_with(p.proname, '_') as is_internal, p.prosecdef, p.proconfig, p.provolatile, p.proparallel,
    p.proretset, p.prorows, p.prosrc, p.proacl, p.proargnames, p.proargmodes, p.pronargs, p.proallargtypes, p.proargtypes, p.prorettype, l.lanname as language,
    coalesce(obj_description(p.oid, 'pg_proc'), '') as comment
  from pg_proc p join pg_language l on l.oid = p.prolang
  where p.pronamespace = 'queue'::regnamespace;
create temp view relations as
  select c.oid, c.relname as name, c.relkind, c.relowner, coalesce(obj_description(c.oid, 'pg_class'), '') as comment
  from pg_class c where c.relnamespace = 'queue'::regnamespace;

select cmp_ok((select count(*) from functions), '>', 100::bigint, 'there are functions to look at');

-- Functions
select is_empty('select f.signature from functions f where not f.is_internal and f.comment = ''''', 'every public function has a comment');
select is_empty($$select f.signature from functions f where f.comment <> '' and f.comment !~ '\.$'$$, 'and it is a sentence');
select results_eq('select f.name from functions f where not f.is_internal and not f.prosecdef order by 1', $$values ('is_busy'::name), ('run_function'), ('work')$$,
                  'public functions are security definer, but for those that run the caller''s, and the one that sees its sessions');
select results_eq($$select f.name from functions f where not f.is_internal and not coalesce('search_path=pg_catalog, pg_temp' = any (f.proconfig), false) order by 1$$,
                  $$values ('defer'::name), ('run_function'), ('work')$$, 'with search_path = pg_catalog, pg_temp, but for defer and those');
select is_empty($$
  select f.name, m[1] from functions f
  cross join regexp_replace(f.prosrc, '--[^\n]*|/[*][^*]*[*]/|''[^'']*''', '', 'g') code
  cross join regexp_matches(regexp_replace(code, 'operator\(pg_catalog\.[<>=]+\)|\mfor \w+ in\M|:=', '', 'gn'),
                            '((?<!pg_catalog\.|queue\.)\m(?!coalesce|cast|log|values|from)\w+\s*\(|\m(distinct from|nullif|in|between|like|case)\M|(?<!pg_catalog\.)\m(text|record|jsonb|regclass|oid|timestamptz)\M|[-+*/<>=~!@#%^&|`?:])', 'g') m
  where f.name in ('defer', '_unrestricted', '_wake', 'run_function', 'work')
$$, 'which qualify each function, operator and type, as does what is planned with defer');
select is_empty('select f.signature from functions f where f.is_internal and f.prosecdef', 'internal functions are security invoker');
select results_eq($$select f.name from functions f where f.is_internal and exists (select from unnest(f.proconfig) c where c !~ '^(enable_|plan_cache_mode|jit=)')$$,
                  $$values ('_defer_any'::name)$$, 'without settings, but of the planner: defer calls one without a search_path of its own');
select is_empty($$select f.signature from functions f where f.proacl is null or exists (select from aclexplode(f.proacl) a where a.grantee = 0)$$, 'PUBLIC may call none');
select is_empty('select f.name, count(*) from functions f group by 1 having count(*) > 1', 'there are no overloads');
select is_empty('select f.signature, f.language from functions f where f.language <> ''plpgsql''', 'the language is PL/pgSQL');
select is_empty($$select f.signature from functions f join pg_type t on t.oid = any (f.proargtypes::oid[] || f.prorettype || coalesce(f.proallargtypes, '{}'))
                  where t.typnamespace = 'queue'::regnamespace$$, 'no signature uses a type of the tables');
select is_empty($$select f.signature, n from functions f cross join unnest(f.proargnames) with ordinality u (n, i)
                  where not f.is_internal and starts_with(n, 'p_')$$, 'public parameters have plain names');
select is_empty($$select f.signature from functions f where f.pronargs > 0 and (f.proargnames is null or '' = any (f.proargnames[1:f.pronargs]))$$, 'every parameter has a name');
select is_empty($$select f.signature from functions f where f.proparallel <> 'u' and f.provolatile = 'v'
                  and f.prosrc ~* '\m(insert into|update queue|delete from|nextval|pg_notify|for update|set_config)\M'$$, 'functions that write are not marked parallel safe');
select is_empty($$select f.signature from functions f where f.proparallel <> 'u' and f.prosrc ~* '\mexception\s+when\M'$$,
  'nor those with a subtransaction, which PostgreSQL 15 refuses there');
select is_empty($$select f.signature from functions f where f.provolatile <> 'v'
                  and f.prosrc ~* '\m(insert into queue|update queue\.|delete from queue|nextval\(|pg_notify|for update)\M'$$, 'nor stable');
select is_empty($$select f.signature from functions f where f.provolatile = 'i' and f.prosrc ~* '\m(from|join) queue\.'$$, 'functions that read tables are not immutable');
select is_empty($$select f.signature from functions f where f.prosrc ~* '\mreturning \*' or f.prosrc ~* 'raise exception ''' and f.prosrc !~* 'errcode'$$, 'errors have a code, and results a list of columns');
select is_empty($$select f.signature from functions f where f.prosrc ~ '\mpg_sleep\M'$$, 'nothing sleeps');

select is_empty($$select f.signature from functions f where f.prosrc ~ '#variable_conflict'$$, 'a name is a variable''s or a column''s, never both: PL/pgSQL would refuse it');
select is_empty($$select f.signature from functions f where strpos(regexp_replace(f.prosrc, '--[^\n]*', '', 'g'), chr(92)) > 0$$,
                'no backslash, which means something else where standard_conforming_strings is off');

-- Errors: one SQLSTATE, one message, and always a hint.
select is_empty($$
  select f.signature, m[1] from functions f cross join regexp_matches(f.prosrc, 'raise exception using(.*?);', 'gs') m where m[1] !~ 'hint\s*:?='
$$, 'every error has a hint');
select is_empty($$
  select m[1], string_agg(distinct m[2], ' | ') from functions f cross join regexp_matches(f.prosrc, 'errcode = ''(QJ[0-9]{3})'',\s*message = ''((?:[^'']|'''')*)''', 'g') m
  where m[1] <> 'QJ090' group by 1 having count(distinct m[2]) > 1
$$, 'and each code its message');

select is_empty($$
  select p.proname from pg_proc p where p.pronamespace = 'queue'::regnamespace and p.proname !~ '^_'
    and p.proname not in ('install', 'migrate', 'version', 'uninstall', 'backoff', 'next_runs', 'is_busy', 'run_function', 'work') and p.prosrc !~ 'queue\.(_check_installed|_defer_any)\('
$$, 'every function that needs the tables says QJ090 without them');

-- Tables, views, constraints, indexes
select is_empty($$select r.name from relations r where r.relkind = 'v' and r.comment = '' and r.name in (select unnest(g.views) from unnest('{operator,reader}'::text[]) k, queue._grants(k) g)$$,
                'every public view has a comment');
select is_empty($$select v.table_name::text from information_schema.views v where v.table_schema = 'queue' and (v.is_updatable, v.is_insertable_into) is distinct from ('NO', 'NO')
                  and v.table_name in (select unnest(g.views) from unnest('{operator,reader}'::text[]) k, queue._grants(k) g)$$,
                'and nobody writes through one, not even the owner');
select is_empty($$
  select c.conname from pg_constraint c where c.connamespace = 'queue'::regnamespace
    and c.contype in ('p', 'u', 'c', 'f', 'x') and c.conname !~ '_(pkey|key|check|fkey|excl)$'
$$, 'constraints are named by their kind');
select is_empty($$select r.name from relations r where r.relkind = 'r' and not exists (select from pg_constraint c where c.conrelid = r.oid and c.contype = 'p')$$, 'every table has a primary key');
select is_empty($$select r.name from relations r where r.relkind = 'i' and r.name !~ '_(idx|pkey|key)$'$$, 'indexes are named as such');
select is_empty($$
  select i.indexrelid::regclass from pg_index i
  cross join lateral unnest(i.indkey) k (attnum)
  join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum and a.atttypid in ('text'::regtype, 'text[]'::regtype)
  join pg_class c on c.oid = i.indexrelid and c.relnamespace = 'queue'::regnamespace
  group by 1 having count(*) > 2
$$, 'no index holds three names: they may be too long for it');
select is((select count(distinct r.relowner) from relations r where r.relkind <> 't'), 1::bigint, 'one role owns it all');

select * from finish();
