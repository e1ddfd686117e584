-- Pausing with patterns, times and tasks.

select plan(47);

\ir queues.helpers.psql

-- Patterns, which cover queues that appear later; the latest call that matches wins.
select queue.pause('mail*') \g /dev/null
select queue.defer('a', queue => 'mail.in'), queue.defer('b', queue => 'mail.out'), queue.defer('c', queue => 'main') \g /dev/null
select is(pg_temp.run(), 'c', 'a pattern covers queues that appear later');
select is(queue.resume('mail.out'), 1, 'a later call');
select is(pg_temp.run(), 'b', 'wins where it matches');
select is(queue.pause(), 1, 'all queues');
select queue.defer('d', queue => 'mail.out') \g /dev/null
select is(pg_temp.run(), null, 'pause everything');
select is(queue.resume(), 2, 'and resume it');
select is(pg_temp.run(), 'a d', 'all go');

-- Until a time
select queue.pause('soon', until => '2999-01-01Z') \g /dev/null
select queue.defer('a', queue => 'soon') \g /dev/null
select is(pg_temp.run(), null, 'a pause until a time');
create function pg_temp.pause_until(queue text, task text, until timestamptz) returns text language plpgsql as $$
declare
  v_message text;
  v_hint text;
begin
  perform queue.pause(queue, until, task);
exception when invalid_parameter_value then
  get stacked diagnostics v_message = message_text, v_hint = pg_exception_hint;
  return concat_ws(': ', v_message, v_hint);
end $$;
select results_eq($q$ select pg_temp.pause_until(queue, task, clock_timestamp() - interval '1 s')
                      from (values ('soon', null), (null, 'a'), (null, null)) t (queue, task) $q$,
                  $$ select 'until is in the past: Pass a later time. queue.resume ends a pause.' from generate_series(1, 3) $$,
                  'a time that is past is refused');
select is(pg_temp.run(), null, 'and lifts no pause');
select queue.resume('soon') \g /dev/null
select is(pg_temp.run(), 'a', 'ends with resume');

-- One task
select queue.defer('x'), queue.defer('y') \g /dev/null
select queue.tick() \g /dev/null
select is(queue.pause(task => 'x'), 1, 'one task: its ready jobs count');
select queue.defer('x') \g /dev/null
select is(pg_temp.run(), 'y', 'its jobs do not start, old or new');
select is((select string_agg(distinct j.state || ' ' || j.reason, ', ') from queue.jobs j where j.task = 'x'), 'ready paused', 'and say so');
select queue.pause('mail*', task => 'x'), queue._add_pause('soon', 'x', '2000-01-01Z'), queue.register_task('y') \g /dev/null
select is((select string_agg(concat_ws(' ', t.name, t.defaults, t.paused_in), ', ' order by t.name) from queue.tasks t), 'x {} {*,mail*}, y {} {}', 'queue.tasks says where');
select is(queue.resume(task => 'x'), 2, 'resumed');
select is((select t.paused_in from queue.tasks t where t.name = 'x'), null, 'and queue.tasks forgets it');
select is(pg_temp.run(), 'x x', 'they go');

-- A call of resume is kept only as an exception to a pause.
create view pg_temp.calls as
select string_agg(concat_ws(' ', coalesce(p.queue, '*'), p.task, case when p.is_paused then 'paused' else 'resumed' end), ', ' order by p.no) as calls from queue.pause p;
select queue.pause('old*'), queue.pause(task => 'x'), queue.resume('far*'), queue.resume('far.1'), queue.resume('old.1'), queue.resume('old.2', 'x'), queue.resume('old.3', 'y') \g /dev/null
select is(calls, 'old* paused, * x paused, far* resumed, far.1 resumed, old.1 resumed, old.2 x resumed', 'exceptions are kept') from pg_temp.calls;
select queue.resume(task => 'x') \g /dev/null
select is(calls, 'old* paused, old.1 resumed', 'as long as there is the pause that they belong to') from pg_temp.calls;
select queue.resume('old*') \g /dev/null
select is(calls, null, 'and no longer') from pg_temp.calls;

-- New jobs say so before they are admitted.
select queue.pause('new*'), queue.resume('new.open'), queue.pause(task => 'x', queue => 'new.open'), queue._add_pause('new.past', null, '2000-01-01Z') \g /dev/null
select queue.defer('a', queue => 'new'), queue.defer('b', queue => 'new.open'), queue.defer('x', queue => 'new.open'), queue.defer('c', queue => 'new.past'), queue.defer('x', queue => 'other'),
  queue.defer('d', queue => 'new', options => '{"delay": "1 day"}'), queue.defer('e', queue => 'new', options => '{"held": true}'), queue.defer('f', queue => 'new', needs => array[currval('queue.job_id_seq')]) \g /dev/null
create view pg_temp.told as select string_agg(concat_ws(' ', j.task, j.state, j.reason), ', ' order by j.id) as told from queue.jobs j where j.finished_at is null;
select is(told, 'a ready paused, b ready, x ready paused, c ready, x ready, d scheduled, e held, f waiting', 'new jobs of a paused queue or task say so') from pg_temp.told;
select queue.tick() \g /dev/null
select is(told, 'a ready paused, b ready, x ready paused, c ready, x ready, d scheduled, e held, f upstream_failed', 'as when they are admitted') from pg_temp.told;
select queue.delete(array_agg(j.id)) from queue.jobs j where j.finished_at is null \g /dev/null
select queue.resume() \g /dev/null

-- Jobs that have passed the gate of paused tasks, and wait for a turn or a slot, do not start either.
select queue.defer('x', lock => 'L'), queue.defer('x', concurrency_key => 'K', concurrency_limit => 1) \g /dev/null
select queue.defer('x', lock => 'L'), queue.defer('y', lock => 'L'), queue.defer('x', concurrency_key => 'K', concurrency_limit => 1),
  queue.defer('y', concurrency_key => 'K', concurrency_limit => 1) \g /dev/null
create temp table first as select f.id, f.claim from queue.fetch((select max(w.id) from queue.workers w), null, 10) f;
select is((select count(*) from first), 2::bigint, 'of each one runs');
select queue.pause(task => 'x') \g /dev/null
select queue.defer('x', lock => 'L2') as head \gset
select queue.defer('x', lock => 'L2') \g /dev/null
select queue.cancel(:head) \g /dev/null
select is((select count(*) from queue.finish_many((select jsonb_agg(jsonb_build_object('id', f.id, 'claim', f.claim, 'outcome', 'succeeded')) from first f)) m where m.error is null),
          2::bigint, 'they end');
select is(pg_temp.run(), 'y', 'the limit lets another task pass, the lock keeps its order');
select is((select string_agg(concat_ws(' ', j.task, j.state, j.reason), ', ' order by j.id) from queue.jobs j where j.state not in ('succeeded', 'cancelled')),
          'x ready paused, y blocked lock, x ready paused, x ready paused', 'the others say what they wait for');
select is_empty('select * from queue.check()', 'sound');
select queue.resume(task => 'x') \g /dev/null
select is(concat_ws(' ', pg_temp.run(), pg_temp.run(), pg_temp.run()), 'x x x y', 'resumed, they go');

-- A running job continues.
select queue.defer('r') as r \gset
select f.claim as claim from queue.fetch(:worker) f \gset
select queue.pause() \g /dev/null
select lives_ok(format('select queue.succeed(%s, %s)', :r, :claim), 'a running job ends as it would');
select queue.resume() \g /dev/null

-- Pauses of a task: the latest call wins, also for jobs that an earlier one has set aside
create function pg_temp.of_task(task text) returns bigint language sql as $$
  select count(*) from queue.fetch((select max(w.id) from queue.workers w), null, 1000, jsonb_build_object('tasks', jsonb_build_array(task)));
$$;
select queue.register_worker('w', info => '{"dead_after": "1 day"}') \g /dev/null
select queue.defer('twice') \g /dev/null
select queue.tick() \g /dev/null
select queue.pause(task => 'twice') \g /dev/null
select queue.pause(task => 'twice', until => clock_timestamp() + interval '1 s') \g /dev/null
select pg_temp.of_task('twice') as early \gset
select ok(:early = 0 or (select max(p.until) <= clock_timestamp() from queue.pause p where p.task = 'twice'), 'a task that is paused forever, and then until a time');
select pg_sleep_until(max(p.until)) from queue.pause p where p.task = 'twice';
select is(pg_temp.of_task('twice') + :early, 1::bigint, 'continues at that time');
select queue.defer('over') \g /dev/null
select queue.tick() \g /dev/null
select queue.pause(task => 'over') \g /dev/null
select queue._add_pause(null, 'over', clock_timestamp()) \g /dev/null
select is_empty('select * from queue.check()', 'a time that came during the wait for the lock');
select is(pg_temp.of_task('over'), 1::bigint, 'ends the pause');
select queue.pause(task => 'over', until => 'infinity') \g /dev/null
select queue.defer('over') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.of_task('over'), 0::bigint, 'until infinity is forever');
select queue.resume(task => 'over') \g /dev/null
select is(pg_temp.of_task('over'), 1::bigint, 'or until resumed');

-- A pause that ends while jobs of the task are admitted
create procedure pg_temp.end_amid(n integer) language plpgsql as $$
begin
  perform queue.pause(task => 'amid', until => clock_timestamp() + interval '40 ms');
  commit;
  perform queue.defer_many((select jsonb_agg('{"task": "amid"}'::jsonb) from generate_series(1, 500)));
  commit;
  perform pg_sleep_until((select max(p.until) from queue.pause p where p.task = 'amid') - n * interval '1 ms');
  perform queue.tick();
  commit;
end $$;
call pg_temp.end_amid(1);
call pg_temp.end_amid(2);
call pg_temp.end_amid(4);
call pg_temp.end_amid(8);
select is_empty('select * from queue.check()', 'a pause that ends while jobs are admitted loses none');
select pg_sleep_until(max(p.until)) from queue.pause p where p.task = 'amid';
select is(sum(pg_temp.of_task('amid'))::bigint, 2000::bigint, 'all of them run') from generate_series(1, 8);

-- A worker of one queue with one lane, which others have filled before the pause
select queue.defer('t', queue => 'solo') from generate_series(1, 4) \g /dev/null
select queue.register_worker('solo', '{solo}') as solo \gset
select is((select count(*) from queue.fetch(:solo, '{solo}')), 1::bigint, 'one of four starts');
select queue.pause('solo') \g /dev/null
set pgdefer.was_dry = off;
select is((select count(*) from queue.fetch(:solo, '{solo}')), 0::bigint, 'a paused queue gives none');
set pgdefer.was_dry = off;
select is((select count(*) from queue.fetch(:solo, '{solo}', 5)), 0::bigint, 'nor several');
select is((select c.ids from queue._claim_plain(:solo, array(select l.lane from queue.lane l where l.queue = 'solo'), 5) c), null, 'even if the pause came after the lanes were read');
select queue.resume('solo') \g /dev/null
select is((select count(*) from queue.fetch(:solo, '{solo}', 5)), 3::bigint, 'and all that are left when it continues');

-- Jobs of a lock: members, some of which wait elsewhere, or were handed over to the next admission
select count(*) from queue.defer_many((select jsonb_agg('{"task": "of lock", "queue": "many", "lock": "L", "lock_mode": "mutex"}'::jsonb) from generate_series(1, 30))) \g /dev/null
select queue._admit_all() \g /dev/null
select is(queue.pause(task => 'of lock'), 30, 'a pause counts each job of a lock once');
select is(queue.resume(task => 'of lock'), 30, 'as the end of the pause does');
begin;
with gone as (
  delete from queue.waiting w where w.id = any (array(select max(j.id) from queue.jobs j where j.task = 'of lock')) returning w.id)
insert into queue.pending_settlement (job_id, kind, flags) select g.id, 'again', 0 from gone g;
select is((select count(*) from queue.unsettled h join queue.lock_member m on m.id = h.job_id), 1::bigint, 'one is handed over');
select is(queue._count_open('many', null), 30, 'and counted once');
rollback;

select * from finish();
