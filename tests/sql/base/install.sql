-- Installing: twice, uninstalling, DROP EXTENSION, and what the tables may depend on.

select plan(45);

-- Everything that install created, as text.
create function pg_temp.made() returns text language sql as $$
  select string_agg(x.line, e'\n' order by x.line)
  from (
    select format('%s %s', c.relkind, c.oid::regclass) from pg_class c
    where c.relnamespace = 'queue'::regnamespace and c.relkind in ('r', 'v', 'S', 'i')
    union all
    select format('%s %s %s', a.attrelid::regclass, a.attname, pg_get_expr(d.adbin, d.adrelid))
    from pg_attribute a join pg_class c on c.oid = a.attrelid
    left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
    where c.relnamespace = 'queue'::regnamespace and a.attnum > 0) x (line)
$$;

create temp table before as select pg_temp.made() as made;

select is((select v.code from queue.version() v), (select v.tables from queue.version() v), 'code and tables have one version');
select matches((select v.code from queue.version() v), '^[0-9]+\.[0-9]+\.[0-9]+$', 'a version is three numbers');

select queue.defer('kept', '{"n": 1}') as kept \gset
select is(queue.install(), (select v.code from queue.version() v), 'install again returns the version');
select is(queue.migrate(), (select v.code from queue.version() v), 'migrate with nothing to do returns the version');
select is(pg_temp.made(), (select b.made from before b), 'and neither changes a table');
select is((select j.args from queue.jobs j where j.id = :kept), '{"n": 1}', 'nor loses a job');
select is((select count(*) from queue.admission), 1::bigint, 'nor makes a second row to lock');

-- Tables of a version that no migration leads from
begin;
update queue.installation set version = '999.0.0';
select is(test.refusal('select queue.migrate()'), 'QJ090', 'tables of a later version: migrate says so');
select is(test.refusal('select queue.install()'), 'QJ090', 'install too');
rollback;

select is(test.refusal('select queue.uninstall()'), '22023', 'uninstall wants force');
select is(test.refusal('select queue.uninstall(force => false)'), '22023', 'force => false is none');
select is(test.refusal('select queue.uninstall(force => null)'), '22023', 'nor is NULL, while there are jobs');
begin isolation level repeatable read;
select is(test.refusal('select queue.uninstall(force => null)'), 'QJ008', 'NULL needs a snapshot that shows all jobs');
rollback;
select is((select count(*) from queue.jobs), 1::bigint, 'and without it nothing is gone');

-- The references of the tables, views, defaults, constraints, indexes, triggers and rules of the schema
create function pg_temp.dependents_of_code() returns setof text language sql as $$
  select pg_describe_object(d.classid, d.objid, d.objsubid)
  from pg_depend d
  join pg_proc p on d.refclassid = 'pg_proc'::regclass and p.oid = d.refobjid
  where p.pronamespace = 'queue'::regnamespace and d.deptype <> 'e'
  union all
  select pg_describe_object(d.classid, d.objid, d.objsubid)
  from pg_depend d
  join pg_depend e on e.classid = d.refclassid and e.objid = d.refobjid and e.deptype = 'e'
  join pg_extension x on e.refclassid = 'pg_extension'::regclass and x.oid = e.refobjid and x.extname = 'pgdefer'
  where d.deptype <> 'e'
$$;
select is_empty('select pg_temp.dependents_of_code()', 'nothing that install made depends on the code');
select is_empty($$
  select c.oid::regclass from pg_depend d join pg_class c on d.classid = 'pg_class'::regclass and c.oid = d.objid
  where c.relnamespace = 'queue'::regnamespace and d.deptype = 'e'
$$, 'no table, view, index or sequence is a member of the extension');

-- Jobs in several states survive all that follows.
select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
select queue.defer('done') as done \gset
select queue.finish_many(jsonb_agg(jsonb_build_object('id', f.id, 'claim', f.claim, 'outcome', 'succeeded')))
from queue.fetch(:worker, max_jobs => 10) f \g /dev/null
select queue.defer('locked', lock => 'l') as first \gset
select queue.defer('locked', lock => 'l') as second \gset
select queue.defer('later', options => '{"delay": "1 hour"}') as later \gset
select f.id as claimed, f.claim as claim from queue.fetch(:worker) f \gset
create temp table states as select j.id, j.state from queue.jobs j;

-- Rows of the tables that have one each are missing, as after a restore without data
select queue.defer('early') as early \gset
create function pg_temp.empty(names text[]) returns void language plpgsql as $$
declare
  v_name text;
begin
  foreach v_name in array names loop
    execute format('delete from queue.%I', v_name);
  end loop;
end $$;
select pg_temp.empty('{installation,cursor,admission,horizon,minute_cursor}') \g /dev/null
select results_eq('select v.tables from queue.version() v', array[null::text], 'without their rows the tables have no version');
select is((select h.fix from queue.health() h where h.name = 'version'), 'Run SELECT queue.install().', 'health says what to run');
select is(test.refusal($$select queue.register_worker('v')$$), 'QJ090', 'no worker registers');
select is(queue.install(), (select v.code from queue.version() v), 'install inserts the rows');
select queue.tick() \g /dev/null
select is_empty('select * from queue.check()', 'and everything is in order');
select pg_temp.empty('{cursor}'), queue.migrate() \g /dev/null
select is_empty(format('select * from queue.fetch(%s)', :worker), 'a session that has claimed before claims nothing again');
select queue.tick() \g /dev/null
select results_eq(format('select j.id, j.state from queue.jobs j where j.id <> %s order by 1', :early), 'select s.id, s.state from states s order by 1', 'no job is admitted twice');
select is((select j.state from queue.jobs j where j.id = :early), 'ready', 'one that was not admitted is');
select is_empty('select * from queue.check()', 'also where only the cursor was missing');
select is(pg_temp.made(), (select b.made from before b), 'the tables are the same');
select queue.delete(array[:early]::bigint[]) \g /dev/null

select exists (select from pg_extension x where x.extname = 'pgdefer') as is_extension \gset
\if :is_extension
  select lives_ok('drop extension pgdefer', 'DROP EXTENSION needs no CASCADE');
  select is((select count(*) from pg_proc p where p.pronamespace = 'queue'::regnamespace), 0::bigint, 'and takes the code');
  select results_eq('select j.id, j.state from queue.jobs j order by 1', 'select s.id, s.state from states s order by 1', 'and keeps the jobs');
  select lives_ok('create extension pgdefer', 'CREATE EXTENSION finds its schema again');
  select is(queue.install(), (select v.tables from queue.version() v), 'install finds its tables again');
  select lives_ok(format('select queue.succeed(%s, %s)', :claimed, :claim), 'a claim made before lasts');
  select is((select f.task from queue.fetch(:worker) f), 'locked', 'jobs go on');
  select is_empty('select * from queue.check()', 'and every invariant holds');
\else
  select skip('pgdefer is not installed as an extension', 8);
\endif

-- Uninstalling and starting again. The schema may hold things of the application, which stay.
create table queue.mine as select 'kept' as note;
create view queue.my_view as select m.note from queue.mine m;
create sequence queue.my_seq;
select lives_ok('select queue.uninstall(force => true)', 'uninstall with force');
select is((select count(*) from pg_class c where c.relnamespace = 'queue'::regnamespace and c.relname !~ '^my_|^mine$'), 0::bigint, 'takes every table, view, index and sequence');
select results_eq('select v.note from queue.my_view v', array['kept'], 'but not the tables and views of an application');
select is(nextval('queue.my_seq'), 1::bigint, 'nor its sequences');
drop table queue.mine cascade;
drop sequence queue.my_seq;
select is((select v.tables from queue.version() v), null, 'version says that there are no tables');
select is(test.refusal('select queue.migrate()'), 'QJ090', 'migrate does too, and what to run');
select is(queue.install(), (select v.code from queue.version() v), 'install creates them again');
select lives_ok('select queue.uninstall(force => null)', 'without jobs NULL is enough');
select is((select v.tables from queue.version() v), null, 'the tables are gone');
select queue.install() \g /dev/null
select is(pg_temp.made(), (select b.made from before b), 'the same ones');
select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
select queue.defer('new') as new \gset
select is((select f.id from queue.fetch(:worker) f), :new::bigint, 'and jobs run');

select * from finish();
