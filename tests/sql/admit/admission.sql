-- Admission: late commits, slices, prepared transactions, rollbacks.

select plan(47);

\ir admission.helpers.psql

set pgdefer.notify = off;  -- PREPARE TRANSACTION refuses notifications

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- Late commits and small ids
begin;
select queue.defer('small id');
prepare transaction 'late';
select queue.defer('great id') \g /dev/null
select is(pg_temp.run(), 'great id', 'others continue while a prepared transaction is open');
select is(pg_temp.run(), null, 'whose job nobody sees');
begin;
select queue.defer('second late');
prepare transaction 'later';
select queue.defer('third') \g /dev/null
select is(pg_temp.run(), 'third', 'nor another one''s');
commit prepared 'late';
select is(pg_temp.run(), 'small id', 'it is admitted after COMMIT PREPARED, however small its id');
select is(pg_temp.run(), null, 'once');
commit prepared 'later';
select is(pg_temp.run(), 'second late', 'so is the other');
begin;
select queue.defer('never');
prepare transaction 'never';
select pg_temp.run() \g /dev/null
rollback prepared 'never';
select is(pg_temp.run(), null, 'ROLLBACK PREPARED leaves nothing');

begin;
select queue.defer('a');
rollback;
select is(pg_temp.run(), null, 'ROLLBACK neither');
begin;
select queue.defer('a');
savepoint s1;
select queue.defer('b');
savepoint s2;
select queue.defer('c');
release s2;
rollback to s1;
select queue.defer('d');
savepoint s3;
select queue.defer('e');
release s3;
commit;
select is(pg_temp.run(), 'a d e', 'savepoints: the jobs not rolled back, once');
select is(pg_temp.run(), null, 'and nothing more');

-- A transaction that has deferred a job itself, and admits
begin;
select queue.defer('own');
select is(pg_temp.run(), null, 'a transaction does not fetch the jobs that it deferred itself');
commit;
select is(pg_temp.run(), 'own', 'the next does');

-- Many transactions that end in a different order than they began
begin; select queue.defer('t1'); prepare transaction 't1';
begin; select queue.defer('t2'); prepare transaction 't2';
begin; select queue.defer('t3'); prepare transaction 't3';
begin; select queue.defer('t4'); prepare transaction 't4';
select pg_temp.run() \g /dev/null
commit prepared 't3';
select is(pg_temp.run(), 't3', 'of four open transactions the third ends first');
rollback prepared 't2';
commit prepared 't4';
begin; select queue.defer('t5'); prepare transaction 't5';
select is(pg_temp.run(), 't4', 'then the fourth');
commit prepared 't5';
commit prepared 't1';
select is(pg_temp.run(), 't1 t5', 'then the first, with one that began later');

-- Slices: 5,000 jobs in slices of 7 while others commit and each admitting session defers too
select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'many', 'priority', n % 3)) from generate_series(1, 5000) n)) \g /dev/null
begin; select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'open')) from generate_series(1, 50) n)); prepare transaction 'open';
do $$
declare
  v_more boolean := true;
  v_n integer := 0;
begin
  while v_more loop
    if v_n % 20 = 0 then
      perform queue.defer('between');
    end if;
    perform queue._lock_admission(true);
    if v_n % 20 = 10 then
      perform queue.defer('own');
    end if;
    select a.has_more into v_more from queue._admit(7) a;
    commit;
    v_n := v_n + 1;
    if v_n > 2000 then
      raise exception 'not done after % slices', v_n;
    end if;
  end loop;
  create temp table slices as select v_n as n;
end $$;
select cmp_ok((select s.n from slices s), '>=', 5000 / 7, 'as many slices as it takes');
select is((select count(*) from queue.active_job v join queue.job j on j.id = v.id where j.task = 'many'), 5000::bigint, 'every job of the backlog is admitted, none twice');
commit prepared 'open';
do $$ begin perform queue._lock_admission(true); perform queue._admit(1000); end $$;
select is((select count(*) from queue.active_job v join queue.job j on j.id = v.id where j.task = 'open'), 50::bigint, 'and what was open meanwhile');
select is((select count(*) from queue.active_job), (select count(*) from queue.jobs j where j.finished_at is null), 'and all that was deferred between and by the admitters');
select is_empty('select no from queue.backlog union all select no from queue.backlog_part', 'no backlog is left');
select is_empty('select * from queue.check()', 'every invariant holds');
create temp table run (n integer generated always as identity, id bigint, claim bigint, priority integer);
do $$
begin
  loop
    insert into run (id, claim, priority) select f.id, f.claim, f.priority from queue.fetch((select max(w.id) from queue.workers w), null, 10000) f;
    exit when not found;
  end loop;
end $$;
select is((select count(*) from run), (select count(*) from queue.jobs j where j.finished_at is null), 'they run');
select is_empty('select * from run r join run s on s.n = r.n + 1 where (-s.priority, s.id) < (-r.priority, r.id)', 'in order, though admitted in slices');
select count(*) from queue.finish_many((select jsonb_agg(jsonb_build_object('id', r.id, 'claim', r.claim, 'outcome', 'succeeded')) from run r)) \g /dev/null

-- A slice that ends within one transaction's rows, and one that ends with it
select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 's')) from generate_series(1, 14) n)) \g /dev/null
select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 's')) from generate_series(1, 7) n)) \g /dev/null
do $$
begin
  for i in 1 .. 8 loop
    perform queue._lock_admission(true);
    perform queue._admit(7);
    commit;
  end loop;
end $$;
select is((select count(*) from queue.active_job), 21::bigint, 'slices that end where a transaction ends');
select is_empty('select no from queue.backlog union all select no from queue.backlog_part', 'leave nothing behind');
select pg_temp.run() \g /dev/null

-- An empty fetch continues while many jobs are not admitted, and tells a sleeper that there are more. Its
-- maintenance may have admitted the last of them, hence the fetch between before_sleep and the sleep.
select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'future', 'scheduled_at', '2999-01-01Z')) from generate_series(1, 5000) n)) \g /dev/null
select queue.defer('now') \g /dev/null
do $$
declare
  v_task text;
  v_wait interval;
  v_n integer := 0;
begin
  loop
    v_n := v_n + 1;
    v_task := pg_temp.run(1);
    exit when v_task is not null or v_n > 20;
    commit;
    select s.wait_for into v_wait from queue.before_sleep((select max(w.id) from queue.workers w)) s;
    perform queue.after_sleep((select max(w.id) from queue.workers w));
    if v_wait <> interval '0' then
      v_n := v_n + 1;
      v_task := pg_temp.run(1);
      exit when v_task is not null;
      raise exception 'may sleep for % though there is more', v_wait;
    end if;
  end loop;
  create temp table found as select v_task as task, v_n as n;
end $$;
select is((select f.task from found f), 'now', 'a ready job behind 5,000 of the future is found without sleep');
select cmp_ok((select f.n from found f), '<=', 10, 'in a few fetches at most');
select count(*) as future from queue.jobs j where j.state = 'scheduled' \gset
select is(:future, 5000, 'the others are scheduled');

-- Creation order between overlapping transactions: that of the visible jobs
begin;
select queue.defer('l a', lock => 'l');
prepare transaction 'a';
select queue.defer('l b', lock => 'l'), queue.defer('l c', lock => 'l') \g /dev/null
select f.id, f.claim, f.task from queue.fetch(:worker) f \gset
select is(:'task'::text, 'l b', 'an older uncommitted job blocks nobody');
commit prepared 'a';
select is(pg_temp.run(), null, 'committed, it does not displace the running one');
select queue.succeed(:id, :claim) \g /dev/null
select is(pg_temp.run(1), 'l a', 'but comes before those that wait');
select is(pg_temp.run(1), 'l c', 'which follow');

-- The clock is set back (the due mark is ahead of it), and passes the mark before the next admission
select queue.defer('later', queue => 'clock') \g /dev/null
select f.id, f.claim from queue.fetch(:worker, '{clock}') f \gset
update queue.cursor set due_at = clock_timestamp() + interval '200 ms' returning due_at as mark \gset
select * from queue.finish_many(jsonb_build_array(jsonb_build_object('id', :id, 'claim', :claim, 'outcome', 'failed', 'options', '{"retry_in": "20 ms"}'::jsonb))) \g /dev/null
select pg_sleep_until(:'mark'), queue.tick() \g /dev/null
select is_empty('select * from queue.check()', 'jobs before the mark are found');
select is((select count(*) from queue.fetch(:worker, '{clock}')), 1::bigint, 'and runs');

-- More jobs of one moment than a slice takes: jobs at the due mark are due
select clock_timestamp() + interval '1 second' as moment \gset
select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 't', 'queue', 'moment', 'scheduled_at', :'moment'))
                         from generate_series(1, 2500))) \g /dev/null
select queue.tick() \g /dev/null
select pg_sleep_until(:'moment'), queue.tick() \g /dev/null
select is((select count(*) from queue.jobs j where j.queue = 'moment' and j.state = 'ready'), 2500::bigint, 'all of one moment are ready');

-- Low marks follow the claims, so that fetch does not read again rows that others' snapshots still keep
select queue.defer_many((select jsonb_agg('{"task": "t", "queue": "marks"}'::jsonb) from generate_series(1, 3000))) \g /dev/null
create procedure pg_temp.drain(queues text[]) language plpgsql as $$
begin
  loop
    perform queue.finish_many(jsonb_agg(jsonb_build_object('id', f.id, 'claim', f.claim, 'outcome', 'succeeded')))
    from queue.fetch((select max(w.id) from queue.workers w), drain.queues, 20) f having count(*) > 0;
    exit when not found;
    commit;
  end loop;
end $$;
call pg_temp.drain('{marks}');
select cmp_ok((select max(l.low_id) from queue.lane l where l.queue = 'marks'), '>', (select min(j.id) from queue.job j where j.queue = 'marks'), 'the low mark of a lane rises as it is drained');

-- Empty lanes are skipped, and if there are very many, dropped
select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 't', 'queue', 'of many ' || n)) from generate_series(1, 1200) n)) \g /dev/null
call pg_temp.drain(null);
select queue.tick() \g /dev/null
select is((select count(*) from queue.lane l where not l.is_idle), 0::bigint, 'idle once they have no ready job');
select queue.tick() \g /dev/null
select cmp_ok((select count(*) from queue.lane), '<', 1000::bigint, 'and dropped');
select queue.defer('t', queue => 'of many 7') \g /dev/null
select is((select count(*) from queue.fetch(:worker)), 1::bigint, 'a job brings its lane back');
select is_empty('select * from queue.check()', 'sound');

-- A job that was in flight when the admission's snapshot was taken is left to a later one, whatever is committed since.
select queue.defer('t', queue => 'in flight') as id \gset
select j.xid as x, (j.xid::text::bigint + 1)::text as next from queue.job j where j.id = :id \gset
begin;
select is((select r.n from queue._admit_range(:'x', 0, :'x', 9223372036854775807, (:'x' || ':' || :'next' || ':' || u.flying)::pg_snapshot, null, 10, 0, 0, false, false) r), u.n, 'in flight: ' || u.flying)
from (values (:'x', 0), ('', 1)) u (flying, n);
rollback;
-- So is a settlement.
select queue.tick() \g /dev/null
select pg_current_snapshot() as before \gset
insert into queue.pending_settlement (job_id, kind, flags) values (:id, 'recheck', 0);
select pg_current_snapshot() as after \gset
begin;
select is((select s.ids from queue._take_settlements('3', '{}', :'before', null) s), null, 'a settlement that was in flight');
select is((select s.ids from queue._take_settlements('3', '{}', :'after', null) s), array[:id::bigint], 'and one that was not');
rollback;
select queue.fetch(:worker) \g /dev/null

-- More jobs are due than a slice takes, and a schedule runs beside them
select queue.schedule('hourly', 'every 1 hour', 'run') \g /dev/null
select queue.defer('due', options => '{"delay": "1 hour"}') from generate_series(1, 3) \g /dev/null
create function pg_temp.has_more() returns boolean language plpgsql as $$
begin
  perform queue._lock_admission(true), queue._admit(1000);
  update queue.waiting w set at = clock_timestamp() from queue.job j where j.id = w.id and j.task = 'due';
  update queue.schedule s set due_at = clock_timestamp();
  return (select a.has_more from queue._admit(2) a);
end $$;
select is(pg_temp.has_more(), true, 'due jobs that are left are not forgotten because a schedule ran');
select queue.unschedule('hourly') \g /dev/null

-- No other role can lock the row of the admission lock
select is((select count(*) from queue.admission), 1::bigint, 'one row is the admitter''s');
select is((select c.relacl::text from pg_class c where c.oid = 'queue.admission'::regclass), null, 'and no other role has a right to it');

select * from finish();
