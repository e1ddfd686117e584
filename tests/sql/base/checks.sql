-- The size of JSON is limited by its text, in every argument. A few bytes may print as very many.

select plan(73);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- SQLSTATE and message of a call. Its effects are undone.
create function pg_temp.refusal(call text) returns text language plpgsql as $$
begin
  execute call;
  raise exception 'accepted' using errcode = 'P0999';
exception when others then
  return case sqlstate when 'P0999' then 'accepted' else concat(sqlstate, ' ', sqlerrm) end;
end $$;

-- JSON that prints n times 131,072 digits, and takes n times 16 bytes
create function pg_temp.digits(n integer) returns jsonb language sql as $$
  select jsonb_build_object('n', (select jsonb_agg('1e131071'::jsonb) from generate_series(1, digits.n)))
$$;

-- JSON text of this many bytes
create function pg_temp.sized(n integer) returns jsonb language sql as $$
  select jsonb_build_object('n', repeat('x', sized.n - 9))
$$;
create temp table kept as select pg_temp.digits(20000) as large, pg_temp.digits(100) as fair;
select ok(pg_column_compression(large) is not null and pg_column_size(large) < 10000, 'in a table it is compressed') from kept;

select is(octet_length(pg_temp.sized(50)::text), 50, 'the tests count right');
select is(queue._text_size(pg_temp.sized(123456), 200000), 123456::bigint, 'the size of a text');
select is(queue._text_size(pg_temp.digits(3), 1000000), octet_length(pg_temp.digits(3)::text)::bigint, 'and of large numbers');
select cmp_ok(queue._text_size(pg_temp.digits(20000), 1000000), '<', 2000000::bigint, 'which are not all printed if a part is too much');
select cmp_ok(queue._text_size(jsonb_build_object('n', '-1e131071'::jsonb), 100), '>', 100::bigint, 'below zero, too');

-- Values that are not measured are below the limit
select cmp_ok(pg_column_size(pg_temp.digits(123)), '<', 2000, 'values stored in less than 2,000 bytes');
select cmp_ok(octet_length(pg_temp.digits(123)::text), '<', 16777216, 'is below the limit even so');

-- Every argument
select is(pg_temp.refusal(call), '22023 the JSON of ' || what || ' is too large', call) from (values
  ('select queue.defer(''t'', pg_temp.digits(200))', 'args'),
  ('select queue.defer(''t'', large) from kept', 'args'),
  ('select queue.defer(''t'', pg_temp.digits(200), ''q'')', 'args'),
  ('select queue.defer(''t'', pg_temp.digits(200), lock => ''l'')', 'args'),
  ('select queue.defer(''t'', pg_temp.sized(16777217))', 'args'),
  ('select queue.defer(''t'', jsonb_build_object(''n'', repeat(chr(1), 3000000)))', 'args'),
  ('select queue.defer_many(jsonb_build_array(jsonb_build_object(''task'', ''t'', ''args'', pg_temp.digits(200))))', 'args'),
  ('select queue.defer_many(jsonb_build_array(jsonb_build_object(''task'', ''t'', ''lock'', ''l'', ''args'', pg_temp.digits(200))))', 'args'),
  ('select queue.defer(''t'', pg_temp.digits(200), queueing_lock => ''k'', options => ''{"on_conflict": "replace"}'')', 'args'),
  ('select queue.defer(''t'', options => jsonb_build_object(''headers'', pg_temp.digits(200)))', 'options'),
  ('select queue.defer(''t'', options => jsonb_build_object(''description'', repeat(''x'', 16777216)))', 'options'),
  ('select queue.schedule(''s'', ''@daily'', ''t'', pg_temp.digits(200))', 'args'),
  ('select queue.register_task(''t'', jsonb_build_object(''headers'', pg_temp.digits(200)))', 'options'),
  ('select queue.register_worker(''w'', info => pg_temp.digits(200))', 'info')) v (call, what);
create table public.sizes (n text);
create trigger sizes after insert on public.sizes for each row execute function queue.defer_trigger('t');
select is(pg_temp.refusal('insert into public.sizes values (repeat(chr(1), 3000000))'), '22023 the JSON of args is too large', 'by a trigger');

-- Values that fit
select lives_ok('select queue.defer(''t'', fair) from kept', 'a value that fits is accepted');
select lives_ok('select queue.defer(''t'', pg_temp.sized(16777216))', 'up to the limit itself');
select count(*) from queue.fetch(:worker, null, 10) \gset
select count(*) from queue.fetch(:worker, null, 10) \gset
select count(*) from queue.fetch(:worker, null, 10) \gset
select is(pg_temp.refusal(format('select queue.set_args(queue.defer(%L), pg_temp.digits(200))', 't')), '22023 the JSON of args is too large', 'set_args');

-- Outcomes: too large a result is refused in succeed, and replaced if the work is already done
select id, claim from queue.jobs where state = 'running' order by id limit 1 \gset
select is(pg_temp.refusal(format('select queue.succeed(%s, %s, pg_temp.digits(200))', :id, :claim)), '22023 the JSON of result is too large', 'succeed');
select queue.finish_many(jsonb_agg(jsonb_build_object('id', j.id, 'claim', j.claim, 'outcome', 'succeeded', 'result', case j.id when :id then pg_temp.digits(200) else '[1]' end)))
from queue.jobs j where state = 'running' \g /dev/null
select results_eq('select j.state, j.result from queue.jobs j where j.state = ''succeeded'' order by j.id',
  $$values ('succeeded', '{"value": "JSON that is too large", "__pgdefer__": "unencodable"}'::jsonb), ('succeeded', '[1]')$$, 'finish_many');
select queue.defer('t') \g /dev/null
select id, claim from queue.fetch(:worker) \gset
select is(queue.fail(:id, :claim, 'e', pg_temp.digits(200)), 'failed', 'details never lose an outcome');
select results_eq('select a.details ? ''truncated'', octet_length(a.details::text) < 100 from queue.attempts a', 'values (true, true)', 'they say that they were too large');

-- The owner sets it
select is(queue.configure('{"max_size": 200000}'), '{"max_size": 200000, "unknown_task_grace": "00:10:00"}', 'configure');
select is(pg_temp.refusal('select queue.defer(''t'', pg_temp.sized(200001))'), '22023 the JSON of args is too large', 'holds at once');
select is(queue.configure('{}'), '{"max_size": 200000, "unknown_task_grace": "00:10:00"}', 'and says what is set');
select is(pg_temp.refusal(format('select queue.configure(%L)', options)), '22023 max_size is out of range', options)
from unnest(array['{"max_size": 99999}', '{"max_size": 268435457}', '{"max_size": 1e131071}', '{"max_size": "much"}', '{"max_size": 100000.5}']) options;
select is(pg_temp.refusal('select queue.configure(''{"size": 1}'')'), '22023 options has an unknown key', 'nothing else');

-- Lists of queues are short: each pattern is compared with each queue
create temp table names as
select n, array(select 'q' || g || case when g <= patterns then '*' else '' end from generate_series(1, n) g) as list
from (values (1000, 100), (1001, 0), (101, 101)) v (n, patterns);
select is(pg_temp.refusal(replace(format(call, :worker), 'LIST', '(select list from names where n = ' || n || ')')), said, format('%s names: %s', n, call))
from (values ('select * from queue.fetch(%s, LIST)'), ('select * from queue.before_sleep(%s, LIST)'), ('select * from queue.peek(LIST, %s)'),
  ('select queue.register_worker(''w%s'', LIST)'), ('select * from queue.fetch(%s, LIST, 1, ''{"tasks": ["z"]}'')'),
  ('select * from queue.fetch(%s, (LIST)[2:] || ''{*}''::text[], 1, ''{"order": "listed"}'')'), ('select * from queue.finish_and_fetch(%s, ''[]'', LIST)'), ('select * from queue.next(LIST, %s > 0)')) c (call)
cross join (values (1000, 'accepted'), (1001, '22023 queues holds more than 1,000 names'), (101, '22023 queues holds more than 100 patterns')) s (n, said);
select is(pg_temp.refusal(format('select * from queue.fetch(%s, %L, 1, ''{"tasks": ["z"]}'')', :worker, list)), '22023 queues is empty or contains NULL', 'with options too: ' || list)
from unnest(array['{}', '{NULL}', '{""}', '{{a,b}}']) list;
select is(pg_temp.refusal(format('select * from queue.fetch(%s, null, 1, %L)', :worker, jsonb_build_object(what, (select jsonb_agg(case what when 'ids' then to_jsonb(n) else to_jsonb(n::text) end) from generate_series(1, m) n)))), said, format('%s %s', m, what))
from unnest(array['tasks', 'ids']) what, (values (1000, 'accepted'), (1001, '22023 tasks or ids holds more than 1,000')) s (m, said);

-- What a role may use counts for itself: it passed none
create role pgdefer_checks_few;
create role pgdefer_checks_others;
create role pgdefer_checks_both in role pgdefer_checks_few, pgdefer_checks_others;
select queue.grant_access(format('pgdefer_checks_%s', name), 'worker', array(select name || g || '*' from generate_series(1, 60) g))
from unnest(array['few', 'others']) name \g /dev/null
set role pgdefer_checks_both;
select queue.register_worker('both') as both \gset
select is_empty(format('select * from queue.fetch(%s)', :both), 'the queues of two roles are not too many');
reset role;
select queue.revoke_access(format('pgdefer_checks_%s', name)) from unnest(array['few', 'others']) name \g /dev/null
drop role pgdefer_checks_both, pgdefer_checks_few, pgdefer_checks_others;
select is_empty('select * from queue.check()', 'everything is in order');

select * from finish();
