-- Opening and closing groups, and joining them.

select plan(40);

create function pg_temp.refusal(call text) returns text language plpgsql as $$
declare
  v_hint text;
begin
  execute call;
  return 'accepted';
exception when others then
  get stacked diagnostics v_hint = pg_exception_hint;
  return sqlstate || ' ' || sqlerrm || case when v_hint = '' then ' without a hint' else '' end;
end $$;

-- Opening
select ok(queue.open_group('g'), 'a group is opened');
select ok(not queue.open_group('g', '{"task": "t"}'), 'opened again, it is the same');
select is((select callbacks from queue.job_group), '{}', 'with its first callbacks, which were none');
select ok(queue.open_group(repeat('g', 1000)), 'a name has up to 1,000 bytes');
select is(pg_temp.refusal($$select queue.open_group(repeat('g', 1001))$$), '22023 name is too long', 'and no more');
select is(pg_temp.refusal($$select queue.open_group('')$$), '22023 name is missing', 'nor none');
select is(pg_temp.refusal('select queue.open_group(null)'), '22023 name is missing', 'nor NULL');
select ok(queue.open_group('{"x}; drop'), 'a name has any characters');
select is((select count(*) from queue.groups), 3::bigint, 'the view shows them');

-- Callbacks
select is(pg_temp.refusal($$select queue.open_group('x', '[]')$$), '22023 on_end must be a JSON object', 'a callback is an object');
select is(pg_temp.refusal($$select queue.open_group('x', '"t"')$$), '22023 on_end must be a JSON object', 'not a name');
select is(pg_temp.refusal($$select queue.open_group('x', '{}')$$), '22023 task is missing', 'with a task');
select is(pg_temp.refusal($$select queue.open_group('x', '{"task": 1}')$$), '22023 on_end has a value of a wrong type', 'by name');
select is(pg_temp.refusal($$select queue.open_group('x', on_success => '{"task": "t", "needs": [1]}')$$), '22023 on_success has an unknown key', 'without needs');
select is(pg_temp.refusal($$select queue.open_group('x', on_failure => '{"task": "t", "queueing_lock": "q"}')$$), '22023 on_failure has an unknown key', 'or a queueing lock');
select is(pg_temp.refusal(format('select queue.open_group(''x'', %L)', jsonb_build_object('task', 't', 'options', jsonb_build_object(k, v)))), '22023 a callback has an option that is not for it', 'or the option ' || k)
from (values ('idempotency_key', '"i"'::jsonb), ('unique_for', '"1 h"'), ('group', '"g"')) x (k, v);
select is(pg_temp.refusal($$select queue.open_group('x', '{"task": "t", "options": {"retry": 3}}')$$), '22023 retry must be a JSON object', 'what defer refuses is refused');
select is(pg_temp.refusal($$select queue.open_group('x', '{"task": "t", "options": []}')$$), '22023 options must be a JSON object', 'options are an object');
select is(pg_temp.refusal($$select queue.open_group('x', '{"task": "t", "args": []}')$$), '22023 args must be a JSON object', 'and so are args');
select is(pg_temp.refusal($$select queue.open_group('x', '{"task": "t", "lock": "{a}"}')$$), '22023 lock names a field that args do not fill', 'which fill every field');
select is(pg_temp.refusal($$select queue.open_group('x', '{"task": "t", "priority": 1e9999}')$$), '22023 on_end has a value of a wrong type', 'numbers are bounded');
select is(pg_temp.refusal($$select queue.open_group('x', jsonb_build_object('task', 't', 'args', jsonb_build_object('a', repeat('x', 20000000))))$$), '22023 the JSON of callbacks is too large', 'and so is their size');
select is(pg_temp.refusal($$select queue.open_group('x', '{"task": "t", "idempotency_key": "k"}')$$), '22023 a callback has an option that is not for it', 'options beside the other keys are checked too');
select queue.open_group('flat', '{"task": "t", "delay": "1 hour"}') \g /dev/null
select is((select callbacks from queue.job_group where name = 'flat'), '{"on_end": {"task": "t", "options": {"delay": "1 hour"}}}', 'and kept as options');
select ok(queue.open_group('all', '{"task": "t", "args": {"a": 1}, "queue": "q", "priority": 2, "lock": "{a}", "concurrency_key": "{a}", "concurrency_limit": 1, "options": {"delay": "1 min"}}', 'null'), 'all else is accepted');
select is((select count(*) from queue.jobs), 0::bigint, 'no job has been deferred');

-- Joining
select is(pg_temp.refusal($$select queue.defer('t', options => '{"group": "none"}')$$), '22023 no such group', 'a job joins only a group that was opened');
select is(pg_temp.refusal($$select queue.defer('t', options => '{"group": 1}')$$), '22023 group must be text', 'by its name');
select is(pg_temp.refusal($$select queue.defer('t', options => '{"group": ["g"]}')$$), '22023 group must be text', 'only one');
select lives_ok($$select queue.defer('t', '{"n": "g"}', options => '{"group": "{n}"}')$$, 'args may fill it');
select queue.register_task('r', '{"group": "{n}"}') \g /dev/null
select lives_ok($$select queue.defer('r', '{"n": "g"}')$$, 'also by a task''s default');
select lives_ok($$select queue.defer('r', options => '{"group": ""}')$$, 'which a call can override');
select results_eq('select j.options ->> ''group'' from queue.job j order by id', $$values ('g'), ('g'), (null)$$, 'jobs keep the name');

-- Closing
select is(pg_temp.refusal($$select queue.close_group('none')$$), '22023 no such group', 'only an open group can be closed');
select is(pg_temp.refusal('select queue.close_group(null)'), '22023 name is missing', 'by its name');
select ok(queue.close_group('g'), 'it is closed');
select is(pg_temp.refusal($$select queue.defer('t', options => '{"group": "g"}')$$), '22023 the group is closed', 'then no job joins it');
select is(pg_temp.refusal($$select queue.open_group('g')$$), '22023 the group is closed', 'nor is it opened again');
