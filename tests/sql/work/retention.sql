-- Retention: from completion, by state, queue, task and job; needed jobs stay; locked ones are skipped.

select plan(80);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- Runs a deferred job to its end.
create function pg_temp.run(id bigint, outcome text) returns void language plpgsql as $$
begin
  perform queue.finish_many(jsonb_build_array(jsonb_build_object('id', f.id, 'claim', f.claim, 'outcome', outcome)))
  from queue.fetch((select max(w.id) from queue.workers w), null, 1, jsonb_build_object('ids', jsonb_build_array(run.id))) f;
end $$;

-- Lets time pass for finished jobs.
create function pg_temp.pass(by interval) returns void language sql as $$
  update queue.finished f set finished_at = f.finished_at - by, purge_at = f.purge_at - by
$$;

create function pg_temp.kept() returns text language sql as $$ select string_agg(j.task, ' ' order by j.id) from queue.jobs j $$;

-- The defaults: succeeded 7 days, failed and cancelled until requested
select queue.defer('succeeded') as a, queue.defer('failed') as b, queue.defer('cancelled') as c, queue.defer('unfinished', scheduled_at => '2999-01-01') as d \gset
select pg_temp.run(:a, 'succeeded'), pg_temp.run(:b, 'failed'), queue.cancel(:c) \g /dev/null
update queue.job set created_at = created_at - interval '1 year';
select is(queue.prune(), 0, 'retention counts from completion: an old job is kept as any other');
select pg_temp.pass('6 days 23 hours');
select is(queue.prune(2147483647), 0, 'within 7 days nothing goes');
select pg_temp.pass('2 hours');
select is((select pruned from queue.tick()), 1, 'tick prunes what has passed');
select is(pg_temp.kept(), 'failed cancelled unfinished', 'succeeded jobs after 7 days');
select pg_temp.pass('10 years');
select is(queue.prune(), 0, 'failed and cancelled ones are kept');
select is(test.refusal(call), '22023', call) from (values
  ('select queue.prune(0)'), ('select queue.prune(-1)'), ('select queue.prune(null)'), ('select queue.prune(10, ''running'')'), ('select queue.prune(10, ''ready'')'), ('select queue.prune(10, '''')'),
  ('select queue.prune(10, null, ''1 day'')'), ('select queue.prune(10, ''failed'', ''-1 day'')'), ('select queue.prune(10, ''failed'', ''200000 years'')')) v (call);
begin isolation level repeatable read;
select is(test.refusal('select queue.prune()'), 'QJ008', 'prune in REPEATABLE READ');
rollback;
select is(queue.prune(state => 'failed', older_than => '11 years'), 0, 'on request: those that are older');
select is(queue.prune(state => 'failed', older_than => '9 years'), 1, 'than what is said');
select is(queue.prune(state => 'cancelled'), 1, 'or all of a state');
select is(pg_temp.kept(), 'unfinished', 'and no other');
select is_empty('select * from queue.attempt', 'with their attempts');
select is_empty('select * from queue.job_override', 'and all else');

-- The job's own, the task's, the queue's
select queue.register_task('of task', '{"retain": "3 days"}');
select queue.configure_queue('brief', '{"retain": "1 hour"}');
select queue.configure_queue('long', '{"retain": "30 days"}');
select queue.defer('own', options => '{"retain": "10 minutes"}') as own, queue.defer('own failed', options => '{"retain": 600}') as own_failed, queue.defer('of task') as of_task,
  queue.defer('brief', queue => 'brief') as brief, queue.defer('brief failed', queue => 'brief') as brief_failed, queue.defer('brief cancelled', queue => 'brief') as brief_cancelled,
  queue.defer('long', queue => 'long') as long, queue.defer('own in brief', queue => 'brief', options => '{"retain": "2 hours"}') as own_in_brief, queue.defer('default') as def,
  queue.defer('at once', options => '{"retain": 0}') as at_once \gset
select pg_temp.run(:own, 'succeeded'), pg_temp.run(:own_failed, 'failed'), pg_temp.run(:of_task, 'succeeded'), pg_temp.run(:brief, 'succeeded'), pg_temp.run(:brief_failed, 'failed'),
  queue.cancel(:brief_cancelled), pg_temp.run(:long, 'succeeded'), pg_temp.run(:own_in_brief, 'succeeded'), pg_temp.run(:def, 'succeeded'), pg_temp.run(:at_once, 'succeeded') \g /dev/null
select is(queue.prune(), 1, 'retain 0 goes with the next pruning');
select pg_temp.pass('11 minutes');
select is(queue.prune(), 2, 'a job''s own retention, whatever its end');
select pg_temp.pass('1 hour');
select is(queue.prune(), 3, 'its queue''s, whatever its end');
select is(pg_temp.kept(), 'unfinished of task long own in brief default', 'a job''s own overrides its queue''s');
select pg_temp.pass('1 hour');
select is(queue.prune(), 1, 'and passes too');
select pg_temp.pass('3 days');
select is(queue.prune(), 1, 'its task''s');
select pg_temp.pass('4 days');
select is(queue.prune(), 1, 'the default');
select is(pg_temp.kept(), 'unfinished long', 'a queue may keep for longer');
select pg_temp.pass('30 days');
select is(queue.prune(), 1, 'and then no more');
-- a queue's retention that is set after its jobs were deferred, or finished
select queue.defer('late', queue => 'late') as before, queue.defer('late', queue => 'late') as ended \gset
select pg_temp.run(:ended, 'succeeded') \g /dev/null
select queue.tick() \g /dev/null
select queue.configure_queue('late', '{"retain": "20 days"}');
select pg_temp.run(:before, 'succeeded') \g /dev/null
select pg_temp.pass('8 days');
select is(queue.prune(), 0, 'a longer retention counts for those that have finished before it was set');
select pg_temp.pass('13 days');
select is(queue.prune(), 2, 'until it has passed');
select queue.defer('late', queue => 'late2') as before \gset
select queue.tick() \g /dev/null
select queue.configure_queue('late2', '{"retain": "1 hour"}');
select pg_temp.run(:before, 'succeeded') \g /dev/null
select pg_temp.pass('2 hours');
select is(queue.prune(), 1, 'a shorter one for those that finish after it');
-- a transaction that named a need may be prepared, and committed long after
select queue.defer('named', options => '{"retain": "10 minutes"}') as named \gset
select pg_temp.run(:named, 'succeeded') \g /dev/null
select queue.tick() \g /dev/null
begin;
select queue.defer('names', needs => array[:named]::bigint[]) \g /dev/null
prepare transaction 'retention';
select pg_temp.pass('11 minutes');
update queue.finished f set purge_at = clock_timestamp() where f.id = :named;
select is(queue.prune(), 0, 'a job named by a prepared transaction is kept');
commit prepared 'retention';
select is(queue.prune(), 0, 'and what it needs then');
select queue.cancel(max(j.id)) from queue.jobs j where j.task = 'names' \g /dev/null
select is(queue.prune(), 1, 'until nothing does');
select queue.prune(state => 'cancelled') \g /dev/null
-- a retention that is raised or removed also counts for jobs that had a shorter one
select queue.configure_queue('late3', '{"retain": "1 hour"}');
select queue.defer('raised', queue => 'late3') as raised, queue.defer('raised', queue => 'late3') as failed \gset
select pg_temp.run(:raised, 'succeeded'), pg_temp.run(:failed, 'failed') \g /dev/null
select queue.configure_queue('late3', '{"retain": "30 days"}');
select pg_temp.pass('8 days');
select is(queue.prune(), 0, 'a longer one than they had');
select queue.configure_queue('late3', '{"retain": null}');
select pg_temp.pass('30 days');
select is(queue.prune(), 1, 'and none: succeeded jobs then have the default, failed ones are kept');
select is(queue.prune(state => 'failed'), 1, 'until it is asked for');
-- moved to a queue with a shorter retention, a job may be named up to that moment
select queue.configure_queue('short', '{"retain": "1 second"}');
select queue.defer('moved', queue => 'late4') as moved \gset
select pg_temp.run(:moved, 'succeeded') \g /dev/null
select pg_temp.pass('1 hour');
select clock_timestamp() as before \gset
select queue.move(array[:moved], 'short') \g /dev/null
select ok((select f.purge_at >= :'before' from queue.finished f where f.id = :moved), 'a job that is moved is not past its retention before that');
select queue.prune() \g /dev/null
-- the clock was set back: the horizon from before counts for nothing
update queue.horizon set looked_at = clock_timestamp() + interval '1 hour', safe_at = clock_timestamp() + interval '1 hour';
select queue.tick() \g /dev/null
select results_eq('select looked_at <= clock_timestamp(), safe_at from queue.horizon', $$values (true, '-infinity'::timestamptz)$$, 'a horizon in the future is discarded');

-- Needs of unfinished jobs are kept
select queue.defer('need') as need, queue.defer('need too') as need2 \gset
select queue.defer('other', scheduled_at => '2999-01-01') as other \gset
select queue.defer('dependent', needs => array[:need, :other]) as dependent, queue.defer('second dependent', needs => array[:need2, :other]) as dependent2 \gset
select pg_temp.run(:need, 'succeeded'), pg_temp.run(:need2, 'succeeded') \g /dev/null
select queue.defer('free') as free \gset
select pg_temp.run(:free, 'succeeded') \g /dev/null
select pg_temp.pass('8 days');
select is(queue.prune(1), 1, 'the needed ones do not hide the others');
select is(pg_temp.kept(), 'unfinished need need too other dependent second dependent', 'and are kept');
select is(queue.prune(state => 'succeeded'), 0, 'on request too');
select queue.cancel(:dependent) \g /dev/null
select is(queue.prune(), 1, 'until nothing unfinished needs them');
select results_eq(format('select deleted_state from queue.need where job_id = %s and need_id = %s', :dependent, :need), array['succeeded'], 'a finished dependent knows their states');
select is(queue.prune(state => 'cancelled'), 1, 'and goes');
select is_empty(format('select * from queue.need where job_id = %s', :dependent), 'with all it knew');
select queue.cancel(:dependent2), queue.cancel(:other) \g /dev/null
select is(queue.prune(), 1, 'the rest');
select queue.prune(state => 'cancelled') \g /dev/null
-- so many that they are skipped for a minute: their retention still counts
select queue.configure_queue('many', '{"retain": "30 days"}');
select queue.defer('dependent', needs => array_agg(queue.defer('need', queue => 'many')) || :d::bigint) as dependent from generate_series(1, 1000) \gset
select queue.done(array(select id from queue.jobs where queue = 'many')) \g /dev/null
update queue.finished f set purge_at = null from queue.job j where j.id = f.id and j.queue = 'many';
select pg_temp.pass('8 days');
select is(queue.prune(), 0, 'a thousand that are needed are kept');
select queue.cancel(:dependent) \g /dev/null
update queue.finished f set purge_at = now() from queue.job j where j.id = f.id and j.queue = 'many' and f.purge_at is not null;
select is(queue.prune(), 0, 'and no longer needed have their queue''s retention');
select pg_temp.pass('23 days');
select queue.prune(), queue.prune(state => 'cancelled') \g /dev/null
-- needed by a job that no worker has admitted yet
select queue.defer('need') as need \gset
select pg_temp.run(:need, 'succeeded') \g /dev/null
select queue.defer('dependent', needs => array[:need, :d]) as dependent \gset
select pg_temp.pass('8 days');
select is(queue.prune(), 0, 'a need of a new job is kept as well');
select queue.cancel(:dependent) \g /dev/null

-- At most max_jobs, oldest retention first
select queue.prune() \g /dev/null
select queue.defer('n' || n, options => jsonb_build_object('retain', n || ' minutes')) from generate_series(1, 5) n \g /dev/null
select count(pg_temp.run(id, 'succeeded')) from queue.jobs where task like 'n_' \g /dev/null
select pg_temp.pass('1 hour');
select is(queue.prune(2), 2, 'at most max_jobs');
select is(pg_temp.kept(), 'unfinished dependent n3 n4 n5', 'those whose time passed first');
select is(queue.prune(), 3, 'the next call continues');
select is_empty('select * from queue.check()', 'everything is in order');

-- A retried job has a new retention
select queue.defer('again', options => '{"retain": "1 hour"}') as id \gset
select pg_temp.run(:id, 'failed') \g /dev/null
select pg_temp.pass('50 minutes');
select queue.retry(array[:id]) \g /dev/null
select is(queue.prune(), 0, 'a retried job is not pruned');
select pg_temp.run(:id, 'failed') \g /dev/null
select pg_temp.pass('50 minutes');
select is(queue.prune(), 0, 'its retention counts from its last completion');
select pg_temp.pass('20 minutes');
select is(queue.prune(), 1, 'and passes');

-- By outcome: what the object leaves out is the queue's, or the default
select queue.defer('s', options => '{"retain": {"succeeded": 0, "failed": "90 days"}}') as s,
  queue.defer('f', options => '{"retain": {"succeeded": 0, "failed": "90 days"}}') as f,
  queue.defer('c', options => '{"retain": {"succeeded": 0, "cancelled": null}}') as c,
  queue.defer('q', queue => 'hours', options => '{"retain": {"succeeded": "1 day"}}') as q \gset
select queue.configure_queue('hours', '{"retain": "2 hours"}');
select pg_temp.run(:s, 'succeeded'), pg_temp.run(:f, 'failed'), queue.cancel(:c), queue.cancel(:q) \g /dev/null
select queue.prune() \g /dev/null
select is(array(select j.task from queue.jobs j where j.id in (:s, :f, :c, :q) order by j.id), '{f,c,q}', 'a succeeded one goes at once');
select pg_temp.pass('3 hours');
select queue.prune() \g /dev/null
select is(array(select j.task from queue.jobs j where j.id in (:s, :f, :c, :q) order by j.id), '{f,c}',
  'an outcome that is left out is kept as long as the queue says');
select pg_temp.pass('90 days');
select queue.prune() \g /dev/null
select is(array(select j.task from queue.jobs j where j.id in (:s, :f, :c, :q) order by j.id), '{c}', 'a failed one for 90 days');
select is(array(select test.refusal(format('select queue.defer(%L, options => %L)', 't', '{"retain": ' || u || '}'))
                from unnest('{"{\"ready\": 1}","{\"failed\": -1}","{\"failed\": {}}","[1]"}'::text[]) u),
  '{22023,22023,22023,22023}', 'other outcomes, and what is no interval, are refused');

-- A job whose end can't be settled stays, and takes no other's place
select queue.defer('stays', queue => 'aside') as stays, queue.defer('goes', queue => 'aside') as goes \gset
select queue.succeed(f.id, f.claim) from queue.fetch(:worker, '{aside}', 2) f \g /dev/null
select is((select array_agg(j.state order by j.id) from queue.jobs j where j.id in (:stays, :goes)), '{succeeded,succeeded}', 'two have ended');
insert into queue.pending_settlement (xid, job_id, kind, flags) values ('0', :stays, 'event', 0);
select is(queue.prune(1, 'succeeded'), 1, 'one of two goes');
select is((select array_agg(j.task) from queue.jobs j where j.id in (:stays, :goes)), '{stays}', 'the one that is settled');
delete from queue.pending_settlement where job_id = :stays;

-- One call lets workers wait for about a second at most
select count(*) from queue.defer_many((select jsonb_agg('{"task": "many", "queue": "many at once"}'::jsonb) from generate_series(1, 14100))) \g /dev/null
do $$ begin
  while exists (select from queue.fetch((select max(w.id) from queue.workers w), '{many at once}', 1000)) loop end loop;
end $$;
select count(*) from queue.finish_many((select jsonb_agg(jsonb_build_object('id', j.id, 'claim', j.claim, 'outcome', 'succeeded')) from queue.jobs j where j.queue = 'many at once')) \g /dev/null
select is((select count(*) from queue.finished f join queue.job j on j.id = f.id where j.queue = 'many at once'), 14100::bigint, 'many jobs have succeeded');
create function pg_temp.slow() returns trigger language plpgsql as $$ begin perform pg_sleep(1.1); return null; end $$;
create trigger slow after delete on queue.finished for each statement execute function pg_temp.slow();
select is(queue.prune(100000, 'succeeded'), 2000, 'slow ones: one round goes');
select pg_temp.pass('8 days');
select is(queue.prune(100000), 2000, 'whose retention has passed too');
drop trigger slow on queue.finished;
select is(queue.prune(100000, 'succeeded') between 1 and 10000, true, 'else 10,000 at most');
select queue.prune(100000, 'succeeded') from generate_series(1, 20) \g /dev/null
select is_empty('select from queue.finished f join queue.job j on j.id = f.id where j.queue = ''many at once''', 'further calls remove the rest');

-- Workers that are never idle remove as many as they run
create function pg_temp.due() returns bigint language sql as $$ select count(*) from queue.finished f where f.purge_at < now() $$;
create function pg_temp.run_all(n integer) returns void language plpgsql as $$
declare
  v_outcomes jsonb := '[]';
begin
  loop
    select jsonb_agg(jsonb_build_object('id', f.id, 'claim', f.claim, 'outcome', 'succeeded')) into v_outcomes
    from queue.finish_and_fetch((select max(w.id) from queue.workers w), v_outcomes, '{busy}', n) f;
    exit when v_outcomes is null;
  end loop;
end $$;
select count(*) from queue.defer_many((select jsonb_agg('{"task": "t", "queue": "busy", "options": {"retain": "1 minute"}}'::jsonb) from generate_series(1, 22000))) \g /dev/null
select pg_temp.run_all(1000);
select pg_temp.pass('62 minutes');
select is(pg_temp.due(), 22000::bigint, 'many are due');
select is((select h.status from queue.health() h where h.name = 'due'), 'warn', 'health says so after an hour');
set pgdefer.pruned_at = '';  -- as if the last look were a minute ago
do $$ begin
  for v_round in 1 .. 12 loop
    perform from queue.defer_many((select jsonb_agg('{"task": "t", "queue": "busy"}'::jsonb) from generate_series(1, 500)));
    commit;
    perform pg_temp.run_all(500);
    commit;
  end loop;
end $$;
select is(pg_temp.due() between 5000 and 16000, true, 'fetches remove a thousand for each five hundred claims: ' || pg_temp.due());
select is((select d.pruned from queue._do_duties('1 hour', 4) d), 4000, 'one call of tick removes many');
select is((select d.pruned from queue._do_duties('0', 5) d), 1000, 'without time, a thousand');
delete from queue.finished f where f.id in (select f.id from queue.finished f where f.purge_at < now() order by f.id offset 10000);
select is((select h.status from queue.health() h where h.name = 'due'), 'ok', 'a few may be needed, and say nothing');
select queue._do_duties('1 hour', 100) \g /dev/null
select is_empty('select * from queue.check()', 'everything is in order');

-- A parent in its first step may await its child, which has ended meanwhile. So may it later: the step has the child's id.
select queue.defer('parent') as parent \gset
select f.claim from queue.fetch(:worker, null, 1, jsonb_build_object('ids', jsonb_build_array(:parent))) f \gset
select from queue.begin_step(:parent, :claim, 'start') \g /dev/null
select queue.defer('child', options => jsonb_build_object('parent', :parent, 'retain', '0 s')) as child \gset
select pg_temp.run(:child, 'succeeded') \g /dev/null
select queue.tick() \g /dev/null
select queue.finish_step(:parent, :claim, 'start', to_jsonb(:child::bigint)) \g /dev/null
select lives_ok(format('select queue.await_jobs(%s, %s, ''wait'', array[%s]::bigint[])', :parent, :claim, :child), 'a job that runs finds its children');
select queue.cancel(:parent) \g /dev/null
select queue.prune() \g /dev/null
select is_empty(format('select from queue.job j where j.id = %s', :child), 'when it has ended, they go');

select * from finish();
