-- Tasks: registered defaults, and refusals.

select plan(89);

select lives_ok($$select queue.register_task('plain')$$, 'a task without defaults');
select lives_ok($$select queue.register_task('plain', null)$$, 'NULL for no defaults');
select is((select t.defaults from queue.tasks t where t.name = 'plain'), '{}', 'is shown with none');

select queue.register_task('nested', '{"queue": "q", "options": {"timeout": "5 s"}, "lock_mode": "mutex"}') \g /dev/null
select is((select t.defaults from queue.tasks t where t.name = 'nested'), '{"queue": "q", "timeout": "5 s", "lock_mode": "mutex"}', 'options may stand apart');
select is(test.refusal($$select queue.register_task('nested', '{"timeout": 1, "options": {"timeout": 1}}')$$), '22023', 'but not twice');
select is(test.refusal($$select queue.register_task('nested', '{"options": {"queue": "q"}}')$$), '22023', 'and only options');

-- Every default replaces NULL, and only NULL.
select queue.register_task('full', '{
  "queue": "q1", "priority": 7, "lock": "lock {n}", "queueing_lock": "one {n}", "deadline": "1 hour",
  "concurrency_key": "key {n}", "concurrency_limit": 3, "timeout": "5 minutes", "description": "by default",
  "headers": {"a": null}, "lock_mode": "mutex", "on_conflict": "ignore", "expires_at": "2999-01-01T00:00:00Z",
  "retain": "1 day", "max_progress": null, "needs_mode": "any"}');
select queue.defer('full', '{"n": 1}') as id \gset
select is((select row (j.queue, j.priority, j.lock, j.queueing_lock, j.concurrency_key, j.description)::text from queue.jobs j where j.id = :id),
          '(q1,7,"lock 1","one 1","key 1","by default")', 'a job takes its task''s defaults');
select is((select j.headers from queue.jobs j where j.id = :id), '{"a": null}', 'headers as they are');
select ok((select j.deadline between now() and now() + interval '61 minutes' from queue.jobs j where j.id = :id), 'a deadline that many from now');
select is((select j.limits from queue.job j where j.id = :id), '{3}', 'the limit of its key');
select is((select j.options ->> 'timeout' from queue.job j where j.id = :id), '5 minutes', 'options as well');
select is((select j.options -> 'max_progress' from queue.job j where j.id = :id), 'null', 'a null that means no limit too');
select is((select j.flags & (2 | 4 | 64 | 128 | 256 | 512) from queue.job j where j.id = :id), 2 | 4 | 64 | 128 | 256 | 512, 'with all that follows from them');
select is(queue.defer('full', '{"n": 1}'), :id::bigint, 'on_conflict too: the existing job');

select queue.defer('full', '{"n": 2}', queue => 'q2', priority => 0, lock => 'own', queueing_lock => 'own', deadline => '2998-01-01',
                   concurrency_key => 'own', concurrency_limit => 9, options => '{"description": "own", "timeout": null}') as id \gset
select is((select row (j.queue, j.priority, j.lock, j.queueing_lock, j.concurrency_key, j.deadline = '2998-01-01', j.description)::text from queue.jobs j where j.id = :id),
          '(q2,0,own,own,own,t,own)', 'arguments of the call override them');
select is((select j.limits from queue.job j where j.id = :id), '{9}', 'the limit too');
select is((select j.options ->> 'timeout' from queue.job j where j.id = :id), '5 minutes', 'options are merged by key, and null means none');

select queue.defer('full', '{"n": 3}', queue => '', lock => '', queueing_lock => '', concurrency_key => '') as id \gset
select is((select row (j.queue, j.priority, j.lock, j.queueing_lock, j.concurrency_key)::text from queue.jobs j where j.id = :id),
          '(default,7,,,)', 'empty text is none, whatever the default');
select is((select j.limits from queue.job j where j.id = :id), null, 'the limit goes with its key');

select queue.defer('full', '{"n": 4}', concurrency_key => 'other') as id \gset
select is((select j.limits from queue.job j where j.id = :id), '{3}', 'a key of the call''s own has the registered limit');
select queue.register_task('limit only', '{"concurrency_limit": 4}');
select queue.defer('limit only', concurrency_key => 'other') as id \gset
select is((select row (j.keys, j.limits)::text from queue.job j where j.id = :id), '({other},{4})', 'also if the task has a limit and no key');
select queue.defer('limit only', concurrency_limit => 5) as id \gset
select is((select row (j.keys, j.limits)::text from queue.job j where j.id = :id), '(,)', 'a limit alone limits nothing');
select queue.defer('full', '{"n": 5}', concurrency_limit => 2) as id \gset
select is((select (j.keys, j.limits)::text from queue.job j where j.id = :id), '("{""key 5""}",{2})', 'the registered key has a limit of the call''s own');

-- Changing
select t.xmin::text || t.ctid::text as row_before from queue.task t where t.name = 'full' \gset
select queue.register_task('full', (select t.defaults from queue.tasks t where t.name = 'full'));
select is((select t.xmin::text || t.ctid::text from queue.task t where t.name = 'full'), :'row_before', 'the same defaults again write nothing');
select queue.register_task('full', '{"queue": "q3"}');
select queue.defer('full') as id \gset
select is((select row (j.queue, j.priority, j.lock)::text from queue.jobs j where j.id = :id), '(q3,0,)', 'new defaults replace all the old ones');
select is((select count(*) from queue.jobs j where j.queue = 'q1'), 3::bigint, 'existing jobs keep theirs');
select queue.register_task('full');
select queue.defer('full') as id \gset
select is((select j.queue from queue.jobs j where j.id = :id), 'default', 'and none again');

-- JSON null and empty text are not defaults.
select queue.register_task('nulls', '{"queue": null, "priority": null, "lock": null, "queueing_lock": "", "deadline": null, "concurrency_key": "",
                                      "concurrency_limit": null, "timeout": null, "headers": null, "concurrency": null, "retry": null}');
select queue.defer('nulls', options => '{}') as id \gset
select is((select row (j.queue, j.priority, j.lock, j.queueing_lock, j.concurrency_key, j.headers)::text from queue.jobs j where j.id = :id),
          '(default,0,,,,)', 'null and empty text are no default');

-- A retry policy keeps its nulls, which mean no limit.
select queue.defer('t', options => '{"retry": {"max_attempts": null, "max_crashes": null}}') as id \gset
select is((select j.options -> 'retry' from queue.job j where j.id = :id), '{"max_attempts": null, "max_crashes": null}', 'a policy''s nulls mean no limit');

-- Moments are relative to the call, whatever a later session's settings.
set timezone = 'Asia/Tokyo';
set datestyle = 'SQL, DMY';
select queue.defer('t', options => '{"expires_at": "2030-02-01 00:00"}') as id \gset
set timezone = 'America/New_York';
set datestyle = 'SQL, MDY';
select is((select j.expires_at from queue.jobs j where j.id = :id), '2030-01-31T15:00:00Z'::timestamptz, 'a moment without a zone counts in the zone of the call');
select is((select j.options ->> 'expires_at' from queue.job j where j.id = :id), '2030-01-31T15:00:00+00:00', 'and is written down in UTC');
select queue.defer('t', options => '{"expires_at": "tomorrow"}') as id \gset
select matches((select j.options ->> 'expires_at' from queue.job j where j.id = :id), '^[0-9]', 'and a word is written down as a moment');
reset timezone;
reset datestyle;

-- Names
select queue.register_task(n, jsonb_build_object('queue', n)) from (values (e'a "b" ''c'' \\ %s {} \n\t$1 ;--'), ('Größe 🐘 日本'), (repeat('é', 500))) v (n);
select queue.defer(t.name) from queue.tasks t where t.defaults ->> 'queue' = t.name;
select is((select count(*) from queue.jobs j where j.task = j.queue), 3::bigint, 'names of any characters, up to 1,000 bytes');
select queue.register_task('CASE', '{"queue": "upper"}'), queue.register_task('case', '{"queue": "lower"}');
select is((select count(*) from queue.tasks t where lower(t.name) = 'case'), 2::bigint, 'case is kept');

-- Refusals
create temp table before as select t.name, t.defaults from queue.tasks t;
select is(test.refusal(call), '22023', left(call, 100))
from (values
  ($$select queue.register_task(null)$$),
  ($$select queue.register_task('')$$),
  ($$select queue.register_task(repeat('x', 1001))$$),
  ($$select queue.register_task('bad', '[]')$$),
  ($$select queue.register_task('bad', '1')$$),
  ($$select queue.register_task('bad', 'null')$$),
  ($$select queue.register_task('bad', '{"unknown": 1}')$$),
  ($$select queue.register_task('bad', '{"args": {}}')$$),
  ($$select queue.register_task('bad', '{"scheduled_at": "2030-01-01"}')$$),
  ($$select queue.register_task('bad', '{"needs": [1]}')$$),
  ($$select queue.register_task('bad', '{"queue": "a*"}')$$),
  ($$select queue.register_task('bad', '{"queue": 5}')$$),
  ($$select queue.register_task('bad', '{"queue": {}}')$$),
  ($$select queue.register_task('bad', jsonb_build_object('queue', repeat('x', 1001)))$$),
  ($$select queue.register_task('bad', '{"priority": "high"}')$$),
  ($$select queue.register_task('bad', '{"priority": 1.5}')$$),
  ($$select queue.register_task('bad', '{"priority": 3000000000}')$$),
  ($$select queue.register_task('bad', '{"lock": 1}')$$),
  ($$select queue.register_task('bad', jsonb_build_object('lock', repeat('x', 1001)))$$),
  ($$select queue.register_task('bad', '{"queueing_lock": []}')$$),
  ($$select queue.register_task('bad', jsonb_build_object('queueing_lock', repeat('x', 1001)))$$),
  ($$select queue.register_task('bad', '{"deadline": "2030-01-01"}')$$),
  ($$select queue.register_task('bad', '{"deadline": "-1 hour"}')$$),
  ($$select queue.register_task('bad', '{"deadline": "200000 years"}')$$),
  ($$select queue.register_task('bad', '{"concurrency_key": "k"}')$$),
  ($$select queue.register_task('bad', '{"concurrency_key": "k", "concurrency_limit": 0}')$$),
  ($$select queue.register_task('bad', '{"concurrency_key": "k", "concurrency_limit": "many"}')$$),
  ($$select queue.register_task('bad', '{"concurrency_key": "k", "concurrency_limit": 1.5}')$$),
  ($$select queue.register_task('bad', '{"concurrency_key": 1, "concurrency_limit": 1}')$$),
  ($$select queue.register_task('bad', '{"concurrency_limit": -1}')$$),
  ($$select queue.register_task('bad', jsonb_build_object('concurrency_key', repeat('x', 1001), 'concurrency_limit', 1))$$),
  ($$select queue.register_task('bad', '{"concurrency_key": "k", "concurrency_limit": 1, "concurrency": [{"key": "k", "limit": 2}]}')$$),
  ($$select queue.register_task('bad', '{"timeout": 0}')$$),
  ($$select queue.register_task('bad', '{"timeout": "200000 years"}')$$),
  ($$select queue.register_task('bad', '{"delay": "-1 s"}')$$),
  ($$select queue.register_task('bad', '{"retry": {"max_attempts": 0}}')$$),
  ($$select queue.register_task('bad', '{"retry": 3}')$$),
  ($$select queue.register_task('bad', '{"max_progress": 12345678901}')$$),
  ($$select queue.register_task('bad', '{"lock_mode": "loose"}')$$),
  ($$select queue.register_task('bad', '{"held": "yes"}')$$),
  ($$select queue.register_task('bad', '{"headers": []}')$$),
  ($$select queue.register_task('bad', '{"expires_at": "soon"}')$$),
  ($$select queue.register_task('bad', '{"parent": 1}')$$)
) v (call);
select results_eq('select t.name, t.defaults from queue.tasks t order by 1', 'select b.name, b.defaults from before b order by 1', 'and nothing has changed');
select is(test.refusal($$select queue.register_task('bad', '{"on_conflict": "explode"}')$$), '22023', 'on_conflict has its values');

-- Registrations take effect from the next call on
create function pg_temp.lock_of(task text, args jsonb default '{}') returns text language plpgsql as $$
declare
  v_id bigint := queue.defer(task, args);
begin
  return (select coalesce(j.lock, 'none') from queue.jobs j where j.id = v_id);
end $$;
select queue.register_task(t.name, t.defaults -> 'none') from queue.tasks t;
select is(pg_temp.lock_of('full'), 'none', 'without defaults defer uses none');
-- Templates that every call of defer would refuse
select is(array(select test.refusal(format('select queue.register_task(%L, %L)', 'braces', d)) from unnest(array['{"lock": "{{a}"}', '{"queueing_lock": "{{a}"}', '{"share": "{{a}"}',
  '{"idempotency_key": "{{a}"}', '{"group": "{{a}"}', '{"concurrency_key": "{{a}", "concurrency_limit": 1}', '{"concurrency": [{"key": "{{a}", "limit": 1}]}']) d), array_fill('22023'::text, '{7}'),
  'a single brace beside doubled ones');
select throws_ok($$select queue.register_task('braces', '{"lock": "{{a}"}')$$, '22023', 'lock has a single brace beside doubled ones', 'with the same message');
select throws_ok($$select queue.schedule('braces', '@daily', 't', options => '{"group": "{{a}"}')$$, '22023', 'group has a single brace beside doubled ones', 'by schedules too');
select lives_ok($$select queue.register_task('braces', '{"lock": "{{a}}", "queueing_lock": "{{{a}}}", "share": "{a}"}')$$, 'doubled ones are accepted');
select queue.register_task('braces') \g /dev/null

select queue.register_task('full', '{"lock": "{n}"}');
select is(pg_temp.lock_of('full', '{"n": 4}'), '4', 'which the next call uses, whatever its plans were');
select is(pg_temp.lock_of('plain'), 'none', 'beside tasks without any');
select is(pg_temp.lock_of('unknown'), 'none', 'registered or not');
begin;
select queue.register_task('full');
select is(pg_temp.lock_of('full'), 'none', 'a transaction uses what it has registered');
rollback;
select is(pg_temp.lock_of('full', '{"n": 5}'), '5', 'until it rolls back');

select * from finish();
