-- check_triggers: triggers that would refuse each row, found before there is one.

select plan(47);

\ir health.helpers.psql

create table public.customer (id integer, name text);
select lives_ok('select queue.check_triggers()', 'no triggers');
select is(pg_temp.health('triggers'), 'ok|no trigger refuses each row', 'as health says');
create trigger good after insert on public.customer for each row
  execute function queue.defer_trigger('welcome', '{"delay": "1 minute", "lock": "{id}", "concurrency_key": "{name}", "concurrency_limit": 1, "concurrency": [{"key": "mail {name}", "limit": 2}], "scheduled_at": null,
    "deadline": "2999-01-01Z", "queueing_lock": "{{a}} {name}", "share": "{id}", "idempotency_key": "", "options": {"group": "", "retry": {"max_attempts": 2}}}');
create trigger plain after insert on public.customer for each row execute function queue.defer_trigger('welcome');
select queue.register_task('known', '{"lock": "{name}", "concurrency_limit": 5}');
create trigger known after insert on public.customer for each row execute function queue.defer_trigger('known');
create trigger limited after insert on public.customer for each row execute function queue.defer_trigger('known', '{"concurrency_key": "{id}"}');
create trigger odd after insert on public.customer for each row execute function queue.defer_trigger('\000 é '' \', '{"queue": "ü\\000"}');
select lives_ok('select queue.check_triggers()', 'good ones');
select lives_ok($$insert into public.customer values (1, 'Ann')$$, 'which take a row');
select is((select count(*)::integer from queue.jobs j), 5, 'and defer');

-- A task's keys count only where the trigger gives none
select queue.register_task('none', '{"concurrency": null}'), queue.register_task('keyed', '{"concurrency_key": "{nmae}", "concurrency_limit": 3}'),
  queue.register_task('listed', '{"concurrency": [{"key": "{nmae}", "limit": 3}]}') \g /dev/null
create function pg_temp.accepted(task text, keys text) returns text[] language plpgsql as $$
declare
  v_checked text;
  v_first_row text;
begin
  execute format('create trigger accepted after insert on public.customer for each row execute function queue.defer_trigger(%L, %L)', task, keys);
  v_checked := test.refusal('select queue.check_triggers()');
  v_first_row := test.refusal(format('insert into public.customer values (2, %L)', accepted.task || accepted.keys));
  drop trigger accepted on public.customer;
  return array[v_checked, v_first_row];
end $$;
select is(pg_temp.accepted(v.task, v.keys), '{accepted,accepted}', format('%s with %s', v.task, v.keys))
from (values ('none', '{}'), ('listed', '{"concurrency_key": "{id}"}'), ('keyed', '{"concurrency": [{"key": "k", "limit": 1}]}'), ('listed', '{"concurrency_key": ""}')) v (task, keys);

-- Each fault is one that the first row meets
create function pg_temp.faults(level text, arguments text) returns text[] language plpgsql as $$
declare
  v_checked text;
  v_first_row text;
begin
  execute format('create trigger "Bad One" after insert on public.customer for each %s execute function queue.defer_trigger(%s)', level, arguments);
  v_checked := test.refusal('select queue.check_triggers()');
  v_first_row := test.refusal('insert into public.customer values (2, ''Bob'')');
  drop trigger "Bad One" on public.customer;
  return array[v_checked, v_first_row];
end $$;
select is(pg_temp.faults(v.level, v.arguments), '{22023,22023}', format('for each %s with %s', v.level, left(v.arguments, 100)))
from (values ('statement', '''t'''), ('row', ''), ('row', ''''''), ('row', '''t'', ''{}'', ''x'''), ('row', '''t'', ''{'''), ('row', '''t'', ''[]'''), ('row', '''t'', ''{"dealy": 1}'''),
  ('row', '''t'', ''{"delay": "soon"}'''), ('row', '''t'', ''{"delay": 1, "options": {"delay": 1}}'''), ('row', '''t'', ''{"options": {"queue": "q"}}'''), ('row', '''t'', ''{"queue": "x*"}'''),
  ('row', '''t'', ''{"lock": "{nmae}"}'''), ('row', '''t'', ''{"queueing_lock": "{nmae}"}'''), ('row', '''t'', ''{"share": "{nmae}"}'''), ('row', '''t'', ''{"idempotency_key": "{nmae}"}'''),
  ('row', '''t'', ''{"concurrency_key": "k"}'''), ('row', '''t'', ''{"concurrency_key": "{nmae}", "concurrency_limit": 1}'''), ('row', '''t'', ''{"concurrency": [{"key": "{nmae}", "limit": 1}]}'''),
  ('row', '''t'', ''{"priority": "x"}'''), ('row', '''t'', ''{"scheduled_at": "soon"}'''), ('row', '''t'', ''{"deadline": "soon"}'''), ('row', '''t'', ''{"scheduled_at": "2999-01-01Z", "delay": 1}'''),
  ('row', '''t'', ''{"parent": "x"}'''), ('row', '''t'', ''{"lock": "\u0000"}'''), ('row', '''t'', ''{"priority": 1e999999}'''), ('row', format('''t'', ''%s''', repeat('[', 20000))),
  ('row', '''t'', ''{"unique_for": "1 day"}'''), ('row', '''listed'''), ('row', '''listed'', ''{"concurrency_limit": 1}''')) v (level, arguments);

-- Generated columns that a trigger does not see
create table public.made (id integer, double integer generated always as (id * 2) stored);
create trigger made before insert on public.made for each row execute function queue.defer_trigger('t', '{"lock": "{double}"}');
select is(test.refusal('select queue.check_triggers()') || test.refusal('insert into public.made values (1)'), '2202322023', 'a generated column before it is computed');
drop trigger made on public.made;
create trigger made after insert on public.made for each row execute function queue.defer_trigger('t', '{"lock": "{double}"}');
select is(array[test.refusal('select queue.check_triggers()'), test.refusal('insert into public.made values (1)')], '{accepted,accepted}', 'not after');
drop table public.made;

-- What is said
create trigger "Bad One" after insert on public.customer for each row execute function queue.defer_trigger('known', '{"lock": "{nmae}"}');
select throws_ok('select queue.check_triggers()', '22023', 'a trigger would refuse each row: lock names a field that args do not fill, template: {nmae}, field: nmae', 'the fault');
select is(pg_temp.health('triggers'), 'fail|triggers that refuse each row: "Bad One" on public.customer: lock names a field that args do not fill, template: {nmae}, field: nmae|Drop them, and create them with other arguments', 'as health says, with the trigger');
create table public.other (id integer);
select lives_ok($$select queue.check_triggers('public.other')$$, 'not one of another table');
select is(test.refusal($$select queue.check_triggers('public.customer')$$), '22023', 'but of this one');
alter table public.customer enable replica trigger "Bad One";
select lives_ok('select queue.check_triggers()', 'one that replicas alone call refuses nothing');
alter table public.customer disable trigger "Bad One";
select lives_ok('select queue.check_triggers()', 'a disabled one refuses nothing');
drop trigger "Bad One" on public.customer;

-- Defaults of the task count
alter table public.customer rename name to title;
select is(test.refusal('select queue.check_triggers()'), '22023', 'a column that is renamed');
select * from finish();
