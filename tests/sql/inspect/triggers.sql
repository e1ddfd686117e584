-- check_triggers: triggers that would refuse each row, found before there is one.

select plan(32);

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
select is(pg_temp.faults(v.level, v.arguments), '{22023,22023}', format('for each %s with %s', v.level, v.arguments))
from (values ('statement', '''t'''), ('row', ''), ('row', ''''''), ('row', '''t'', ''{}'', ''x'''), ('row', '''t'', ''{'''), ('row', '''t'', ''[]'''), ('row', '''t'', ''{"dealy": 1}'''),
  ('row', '''t'', ''{"delay": "soon"}'''), ('row', '''t'', ''{"delay": 1, "options": {"delay": 1}}'''), ('row', '''t'', ''{"options": {"queue": "q"}}'''), ('row', '''t'', ''{"queue": "x*"}'''),
  ('row', '''t'', ''{"lock": "{nmae}"}'''), ('row', '''t'', ''{"queueing_lock": "{nmae}"}'''), ('row', '''t'', ''{"share": "{nmae}"}'''), ('row', '''t'', ''{"idempotency_key": "{nmae}"}'''),
  ('row', '''t'', ''{"concurrency_key": "k"}'''), ('row', '''t'', ''{"concurrency_key": "{nmae}", "concurrency_limit": 1}'''), ('row', '''t'', ''{"concurrency": [{"key": "{nmae}", "limit": 1}]}'''),
  ('row', '''t'', ''{"priority": "x"}'''), ('row', '''t'', ''{"scheduled_at": "soon"}'''), ('row', '''t'', ''{"deadline": "soon"}'''), ('row', '''t'', ''{"scheduled_at": "2999-01-01Z", "delay": 1}'''),
  ('row', '''t'', ''{"parent": "x"}''')) v (level, arguments);

-- What is said
create trigger "Bad One" after insert on public.customer for each row execute function queue.defer_trigger('known', '{"lock": "{nmae}"}');
select throws_ok('select queue.check_triggers()', '22023', 'a trigger would refuse each row: lock names a field that args do not fill, template: {nmae}, field: nmae', 'the fault');
select is(pg_temp.health('triggers'), 'fail|triggers that refuse each row: "Bad One" on public.customer: lock names a field that args do not fill, template: {nmae}, field: nmae|Drop them, and create them with other arguments', 'as health says, with the trigger');
alter table public.customer disable trigger "Bad One";
select lives_ok('select queue.check_triggers()', 'a disabled one refuses nothing');
drop trigger "Bad One" on public.customer;

-- Defaults of the task count
alter table public.customer rename name to title;
select is(test.refusal('select queue.check_triggers()'), '22023', 'a column that is renamed');
select * from finish();
