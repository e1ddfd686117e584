-- Manual retries that change the job: its time, priority, queue and lock, in one call.

select plan(89);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

create function pg_temp.job(id bigint) returns text language sql as $$
  select concat_ws(' ', j.state, j.reason, j.queue, j.priority, j.lock) from queue.jobs j where j.id = job.id
$$;

-- The result of retry, in the order of ids.
create function pg_temp.retry(changes jsonb, variadic ids bigint[]) returns text language sql as $$
  select string_agg(concat_ws(' ', r.outcome, r.error), ', ' order by r.id) from queue.retry(ids, true, changes => changes) r
$$;

\ir retry.helpers.psql

-- What can run next, in the order in which it does.
create function pg_temp.next() returns text language plpgsql as $$
declare
  v_job record;
begin
  select f.id, f.claim, f.task into v_job from queue.fetch((select max(w.id) from queue.workers w)) f;
  if v_job.id is not null then
    perform queue.finish_many(jsonb_build_array(jsonb_build_object('id', v_job.id, 'claim', v_job.claim, 'outcome', 'succeeded')));
  end if;
  return v_job.task;
end $$;

-- One job of each kind that may be retried: finished, running, waiting for a retry, sleeping, and cancelled before it started.
create temp table subject (kind text, id bigint);
create procedure pg_temp.subjects(lock text default null, options jsonb default '{}') language plpgsql as $$
declare
  v_kind text;
  v_id bigint;
  v_claim bigint;
begin
  delete from subject;
  foreach v_kind in array '{failed,running,retrying,sleeping,unstarted}'::text[] loop
    v_id := queue.defer(v_kind, queue => 'one', lock => nullif(subjects.lock, '') || v_kind, options => subjects.options);
    commit;
    if v_kind = 'unstarted' then
      perform queue.cancel(v_id);
    else
      select f.claim into v_claim from queue.fetch((select max(w.id) from queue.workers w), null, 1, jsonb_build_object('ids', jsonb_build_array(v_id))) f;
      case v_kind
        when 'failed' then perform queue.fail(v_id, v_claim, 'e');
        when 'retrying' then perform queue.fail(v_id, v_claim, 'e', options => '{"retry_in": "1 day"}');
        when 'sleeping' then perform queue.sleep(v_id, v_claim, 's', now() + interval '1 day');
        else null;
      end case;
    end if;
    insert into subject values (v_kind, v_id);
  end loop;
  perform queue.tick();
end $$;
create function pg_temp.ids() returns bigint[] language sql as $$ select array_agg(s.id order by s.id) from subject s $$;
create function pg_temp.each() returns text language sql as $$
  select string_agg(distinct pg_temp.job(s.id), ', ') from subject s
$$;
create function pg_temp.clear() returns bigint language sql as $$
  select count(*) from queue.delete(array(select j.id from queue.jobs j), true)
$$;

-- All at once, from every state
call pg_temp.subjects();
select is(pg_temp.each(), 'cancelled cancelled one 0, failed attempts one 0, running one 0, scheduled one 0', 'jobs in every state that a retry takes');
select is(pg_temp.retry('{"retry_at": "2999-01-01Z", "priority": 7, "queue": "two", "lock": "L"}', variadic pg_temp.ids()),
  'scheduled, scheduled, scheduled, scheduled, scheduled', 'wait for the time');
select is(pg_temp.each(), 'scheduled two 7 L', 'with the queue, priority and lock');
select results_eq('select distinct j.scheduled_at from queue.jobs j', $$values ('2999-01-01Z'::timestamptz)$$, 'all with that time');
select is((select string_agg(distinct concat_ws(' ', j.failures, j.error is null or j.task <> 'running'), ', ') from queue.jobs j), '0 t', 'and counters reset');
select results_eq('select l.lock collate "default", l.id, l.has_turn from queue.lock_member l order by l.id', 'select ''L'', s.id, s.kind = ''failed'' from subject s order by s.id', 'they are members of the lock, and the first by id has the turn');
select is_empty('select * from queue.check()', 'sound');
select is(pg_temp.retry('{}', variadic pg_temp.ids()), 'ready, blocked, blocked, blocked, scheduled QJ003', 'a retry without changes is at once; the one that has never started keeps its time');
select queue.reschedule(id) from subject where kind = 'unstarted' \g /dev/null
select results_eq(format('select f.task, f.queue, f.priority, f.lock collate "default" from queue.fetch(%s, null, 9) f', :worker), $$values ('failed', 'two', 7, 'L')$$, 'of the lock one runs');
select is_empty('select * from queue.check()', 'sound');
select queue.succeed(j.id, j.claim) from queue.jobs j where j.state = 'running' \g /dev/null
select is((select array_agg(pg_temp.next()) from generate_series(1, 5)), '{running,retrying,sleeping,unstarted,null}', 'then the others, in the order of ids');
select pg_temp.clear() \g /dev/null

-- Each change alone; null is not given
call pg_temp.subjects('a ');
select is(pg_temp.retry('{"priority": 3, "queue": null, "lock": null, "retry_at": null, "retry_in": null}', variadic pg_temp.ids()), 'ready, ready, ready, ready, ready', 'a priority');
select is((select string_agg(distinct concat_ws(' ', j.queue, j.priority, j.lock = 'a ' || j.task), ', ') from queue.jobs j), 'one 3 t', 'and nothing else');
select pg_temp.clear() \g /dev/null
call pg_temp.subjects('a ');
select is(pg_temp.retry('{"lock": ""}', variadic pg_temp.ids()), 'ready, ready, ready, ready, ready', 'empty text: no lock');
select is(pg_temp.each(), 'ready one 0', 'they have none');
select is_empty('select * from queue.lock_member', 'and are members of none');
select is((select count(*) from queue.fetch(:worker, null, 9)), 5::bigint, 'so they run together');
select pg_temp.clear() \g /dev/null
call pg_temp.subjects('a ');
select is(pg_temp.retry('{"retry_in": "1 hour"}', variadic pg_temp.ids()), 'scheduled, scheduled, scheduled, scheduled, scheduled', 'a time from now');
select ok(bool_and(j.scheduled_at between clock_timestamp() + interval '30 minutes' and clock_timestamp() + interval '1 hour'), 'by the clock of the database') from queue.jobs j;
select is(pg_temp.retry('{"retry_in": 0}', id), 'ready', 'none') from subject where kind = 'failed';
select is(pg_temp.retry('{"retry_at": "2001-01-01Z"}', id), 'ready', 'a time that has passed') from subject where kind = 'running';
select is_empty('select * from queue.check()', 'sound');
select pg_temp.clear() \g /dev/null
select queue.defer('later', scheduled_at => '2999-01-01Z') as later \gset
select queue.cancel(:later) \g /dev/null
select is(pg_temp.retry('{"retry_in": 0}', :later), 'ready', 'a job cancelled before its time runs at the given one');
select is(pg_temp.next(), 'later', 'it does');

-- A template is no template
select is(pg_temp.retry('{"lock": "{x}"}', :later), 'ready', 'a lock with braces');
select is(pg_temp.job(:later), 'ready default 0 {x}', 'is taken as it is');
select pg_temp.clear() \g /dev/null

-- The new lock is held, and waited for: the place is that of the id
select queue.defer('a', options => '{"retry": {"max_attempts": 1}}') as a, queue.defer('head', lock => 'L') as head, queue.defer('b') as b, queue.defer('last', lock => 'L') as last \gset
select pg_temp.run(:a, 'failed'), pg_temp.run(:b, 'failed') \g /dev/null
select id, claim from queue.fetch(:worker) \gset
select is(:id::bigint, :head::bigint, 'a lock that is held, and waited for');
select is(pg_temp.retry('{"lock": "L"}', :b, :a), 'blocked, blocked', 'two jobs join it');
select is_empty('select * from queue.check()', 'sound');
select queue.succeed(:head, :claim) \g /dev/null
select is((select array_agg(pg_temp.next()) from generate_series(1, 4)), '{a,b,last,null}', 'they run in the order of ids');

-- An older job takes the turn of a younger one that is ready
select queue.defer('old') as old, queue.defer('young', lock => 'L') as young \gset
select pg_temp.run(:old) , queue.tick() \g /dev/null
select is(pg_temp.job(:young), 'ready default 0 L', 'a young job has the turn');
select is(pg_temp.retry('{"lock": "L"}', :old), 'ready', 'an older one joins the lock, and is its head');
select is(pg_temp.job(:young), 'blocked lock default 0 L', 'the younger waits');
select is((select array_agg(pg_temp.next()) from generate_series(1, 3)), '{old,young,null}', 'in this order');

-- The old lock passes its turn on, whatever state the job is in
call pg_temp.subjects('a ');
select queue.defer('next ' || s.kind, lock => 'a ' || s.kind) from subject s order by s.id \g /dev/null
select queue.tick() \g /dev/null
select is((select string_agg(j.task, ', ' order by j.id) from queue.jobs j where j.state = 'ready' and starts_with(j.task, 'next')), 'next failed, next unstarted', 'unfinished jobs keep the turn');
select pg_temp.retry('{"lock": "b"}', variadic pg_temp.ids()) \g /dev/null
select is((select count(*) from queue.jobs j where j.state = 'ready' and starts_with(j.task, 'next')), 5::bigint, 'until they leave the lock');
select is((select string_agg(pg_temp.job(s.id), ', ' order by s.id) from subject s where s.kind <> 'failed'), 'blocked lock one 0 b, blocked lock one 0 b, blocked lock one 0 b, blocked lock one 0 b', 'in the other they wait for its head');
select is_empty('select * from queue.check()', 'sound');
select pg_temp.clear() \g /dev/null
call pg_temp.subjects('a ', '{"lock_mode": "mutex"}');
select pg_temp.retry('{"lock": "b"}', variadic pg_temp.ids()) \g /dev/null
select is((select string_agg(distinct pg_temp.job(s.id), ', ') from subject s), 'blocked lock one 0 b, ready one 0 b', 'a mutex, of which they share the one slot');
select is((select count(*) from queue.fetch(:worker, null, 9)), 1::bigint, 'one runs');
select is_empty('select * from queue.check()', 'sound');
select pg_temp.clear() \g /dev/null

-- The limits of the new queue, and its shares
select queue.configure_queue('two', '{"max_running": 1}') \g /dev/null
call pg_temp.subjects(options => '{"share": "s"}');
select pg_temp.retry('{"queue": "two"}', variadic pg_temp.ids()) \g /dev/null
select is((select count(*) from queue.fetch(:worker, null, 9)), 1::bigint, 'the limit of the new queue counts');
select is_empty('select * from queue.check()', 'sound');
select queue.configure_queue('two', '{"max_running": null}'), pg_temp.clear() \g /dev/null
-- A job that has kept its tag gives it back, so its share does not fall behind there
select queue.defer('back', queue => 'one', options => '{"share": "s"}') as back, queue.defer('first', queue => 'one', options => '{"share": "other"}') \gset
select claim from queue.fetch(:worker) where id = :back \gset
select queue.release(:back, :claim), queue.reschedule(:back, '2999-01-01Z') \g /dev/null
select is((select tag is not null from queue.job_now where id = :back), true, 'a job with a tag waits');
create function pg_temp.tag() returns timestamptz language sql as $$ select max(t.tag) from queue.share_tag t where t.queue = 'one' and t.share = 's' $$;
select pg_temp.tag() as tag \gset
select is(pg_temp.retry('{"queue": "two"}', :back), 'ready', 'and goes to another queue');
select is(pg_temp.job(:back), 'ready two 0', 'where it is');
select is(:'tag'::timestamptz - pg_temp.tag(), interval '0.1 s', 'its share goes back by one turn');
select pg_temp.clear() \g /dev/null

-- Needs are waited for; the key of a job that has never started is another's
select queue.defer('need', scheduled_at => '2999-01-01Z') as need \gset
select queue.defer('needy', needs => array[:need]) as needy \gset
select queue.cancel(:needy) \g /dev/null
select is(pg_temp.retry('{"queue": "two", "lock": "L", "priority": 2}', :needy), 'waiting', 'a job that has to wait for its needs');
select is(pg_temp.job(:needy), 'waiting two 2 L', 'does so with the changes');
select queue.defer('keyed', queueing_lock => 'K') as keyed \gset
select queue.cancel(:keyed), queue.defer('holder', queueing_lock => 'K') \g /dev/null
select is(pg_temp.retry('{"queue": "two", "lock": "L", "priority": 2, "retry_in": 9}', :keyed), 'cancelled QJ004', 'a job whose key another holds');
select is(pg_temp.job(:keyed), 'cancelled cancelled default 0', 'has not changed');
select pg_temp.clear() \g /dev/null

-- Refused jobs do not change, and the others do
select queue.defer('ready') as ready, queue.defer('ended') as ended \gset
select pg_temp.run(:ended) \g /dev/null
select is(pg_temp.retry('{"queue": "two", "lock": "L", "priority": 2, "retry_in": 9}', :ready, :ended, 999999), 'ready QJ003, scheduled, QJ001', 'of three jobs one is retried');
select is(pg_temp.job(:ready), 'ready default 0', 'one that is refused keeps all');
select is(pg_temp.job(:ended), 'scheduled two 2 L', 'the other one has the changes');

-- With a step
select queue.defer('steps') as steps \gset
select claim from queue.fetch(:worker, null, 1, jsonb_build_object('ids', jsonb_build_array(:steps))) \gset
select queue.finish_step(:steps, :claim, 'a'), queue.finish_step(:steps, :claim, 'b'), queue.fail(:steps, :claim, 'e') \g /dev/null
select is((select outcome from queue.retry(array[:steps], from_step => 'b', changes => '{"queue": "two"}')), 'ready', 'a step, and a queue');
select results_eq(format('select j.queue, s.name from queue.jobs j, queue.steps s where j.id = %s and s.job_id = j.id', :steps), $$values ('two', 'a')$$, 'both count');

-- What the audit keeps
select queue.retry(array[:ended], true, changes => '{"retry_at": "2999-01-01Z", "priority": 3, "queue": "three", "lock": "M"}') \g /dev/null
select pg_temp.run(:steps) \g /dev/null
select queue.retry(array[:steps], changes => '{"lock": "M", "queue": null}') \g /dev/null
select is((select array_agg(concat_ws(' ', a.call, a.args -> 'changes', a.queues, (a.before -> 0) - 'scheduled_at', a.before -> 0 ? 'scheduled_at') order by a.id)
    from (select * from queue.audit a order by a.id desc limit 2) a),
  array['retry {"lock": "M", "queue": "three", "priority": 3, "retry_at": "2999-01-01Z"} {three,two} {"lock": "L", "queue": "two", "state": "scheduled", "priority": 2} t',
    'retry {"lock": "M"} {two} {"lock": null, "queue": "two", "state": "succeeded"} f'], 'the changes, and what was before');

-- Bad changes change nothing
select is(test.refusal(format('select queue.retry(array[%s], true, changes => %L)', :ended, c)), '22023', left(c, 80)) from unnest(array[
  'null', '[]', '"x"', '1', '{"x": 1}', '{"retryable": true}', '{"reason": "r"}', '{"retry_at": "x"}', '{"retry_at": 1}', '{"retry_at": 20300101}', '{"retry_at": "infinity"}', '{"retry_at": "10000-01-01Z"}',
  '{"retry_in": "x"}', '{"retry_in": -1}', '{"retry_in": "4001 years"}', '{"retry_at": "2999-01-01Z", "retry_in": 1}', '{"priority": "x"}', '{"priority": 1.5}', '{"priority": 2147483648}',
  '{"queue": ""}', '{"queue": "x*"}', '{"queue": 1}', '{"lock": 1}', '{"lock": []}', jsonb_build_object('queue', repeat('x', 1001))::text, jsonb_build_object('lock', repeat('x', 1001))::text]) c;
select is(pg_temp.job(:ended), 'scheduled three 3 M', 'it is as it was');
select is_empty('select * from queue.check()', 'sound');

-- A role that is limited to some queues moves no job out of them
create role pgdefer_retry_some;
select queue.grant_access('pgdefer_retry_some', 'operator', '{own*}') \g /dev/null
select queue.defer('own', queue => 'own') as own \gset
select pg_temp.run(:own) \g /dev/null
set role pgdefer_retry_some;
select is(test.refusal(format('select queue.retry(array[%s], changes => ''{"queue": "two"}'')', :own)), '42501', 'not to another queue');
select is(test.refusal(format('select queue.retry(array[%s], changes => ''{"queue": "own2"}'')', :ended)), 'QJ001', 'nor one of another queue to its own');
select is((select outcome from queue.retry(array[:own], changes => '{"queue": "own2", "lock": "L"}')), 'ready', 'within its own it may');
reset role;
select is(pg_temp.job(:own) || '; ' || pg_temp.job(:ended), 'ready own2 0 L; scheduled three 3 M', 'and only that has changed');
select queue.revoke_access('pgdefer_retry_some') \g /dev/null
drop role pgdefer_retry_some;

select * from finish();
