-- The restore guard: the stored transaction ids may lie ahead of the cluster, far behind it, or mean nothing.

select plan(33);

set pgdefer.notify = off;

create function pg_temp.shifted(xid xid8, by bigint) returns xid8 language sql as $$
  select greatest(3, shifted.xid::text::bigint + shifted.by)::text::xid8
$$;
create function pg_temp.shifted(upto pg_snapshot, by bigint) returns pg_snapshot language sql as $$
  select format('%s:%s:%s', pg_temp.shifted(pg_snapshot_xmin(upto), by), pg_temp.shifted(pg_snapshot_xmax(upto), by),
                (select string_agg(pg_temp.shifted(x, shifted.by)::text, ',') from pg_snapshot_xip(upto) x))::pg_snapshot
$$;

-- Shifts every stored transaction id, as if this were the dump of another cluster.
create function pg_temp.shift(by bigint) returns void language plpgsql as $$
begin
  update queue.job j set xid = greatest(3, j.xid::text::bigint + shift.by)::text::xid8;
  update queue.pending_settlement h set xid = greatest(3, h.xid::text::bigint + shift.by)::text::xid8;
  update queue.cursor c set next_xid = greatest(3, c.next_xid::text::bigint + shift.by)::text::xid8,
    in_flight = array(select (x::text::bigint + shift.by)::text::xid8 from unnest(c.in_flight) x where x::text::bigint + shift.by > 3);
  update queue.backlog b set from_xid = pg_temp.shifted(b.from_xid, shift.by), to_xid = pg_temp.shifted(b.to_xid, shift.by),
    own = pg_temp.shifted(b.own, shift.by), upto = pg_temp.shifted(b.upto, shift.by);
  update queue.backlog_part b set from_xid = pg_temp.shifted(b.from_xid, shift.by), to_xid = pg_temp.shifted(b.to_xid, shift.by),
    own = pg_temp.shifted(b.own, shift.by), upto = pg_temp.shifted(b.upto, shift.by);
end $$;

create temp table ran (n integer generated always as identity, id bigint, task text);
create function pg_temp.run() returns text language plpgsql as $$
declare
  v_text text;
begin
  with fetched as (
    insert into ran (id, task) select f.id, f.task from queue.fetch((select max(w.id) from queue.workers w where w.name = 'runner'), null, 500) f returning id, task)
  select string_agg(distinct f.task, ', ' order by f.task) into v_text from fetched f;
  perform queue.succeed(v.id, v.claim) from queue.active_job v where v.id in (select r.id from ran r) and v.claim is not null;
  return v_text;
end $$;

-- Jobs in every place. `prefix` distinguishes the rounds.
create procedure pg_temp.fill(prefix text) language plpgsql as $$
declare
  v_worker bigint := queue.register_worker('holder', info => '{"dead_after": "1 day"}');
  v_runner bigint := queue.register_worker('runner', info => '{"dead_after": "1 day"}');
  v record;
  v_id bigint;
begin
  perform queue.defer(prefix || 'succeeded', queue => prefix);
  perform queue.defer(prefix || 'handed over', queue => prefix, lock => prefix || 'h');
  perform queue.defer(prefix || 'running', queue => prefix, lock => prefix || 'r');
  perform queue.defer(prefix || 'retried with another lock', queue => prefix, lock => prefix || 'x', options => '{"retry": {"max_attempts": 5}}');
  commit;
  for v in select f.id, f.claim, f.task from queue.fetch(v_worker, array[prefix], 10) f loop
    if v.task = prefix || 'succeeded' then
      perform queue.succeed(v.id, v.claim);
    elsif v.task = prefix || 'retried with another lock' then
      perform queue.fail(v.id, v.claim, 'x', options => jsonb_build_object('lock', prefix || 'r'));
    end if;
  end loop;
  commit;
  perform queue.defer(prefix || 'blocked', queue => prefix, lock => prefix || 'r');
  perform queue.defer(prefix || 'after the handover', queue => prefix, lock => prefix || 'h');
  perform queue.defer(prefix || 'scheduled', options => '{"delay": "1 hour"}');
  perform queue.defer(prefix || 'held', options => '{"held": true}');
  perform queue.defer(prefix || 'slot', concurrency_key => prefix, concurrency_limit => 1) from generate_series(1, 3);
  v_id := queue.defer(prefix || 'ready');
  perform queue.defer(prefix || 'needs', needs => array[v_id]);
  commit;
  perform queue.tick();
  commit;
  perform queue.defer_many((select jsonb_agg(jsonb_build_object('task', prefix || 'backlog')) from generate_series(1, 60) n));
  commit;
  perform queue._lock_admission(true);
  perform queue._admit(10);
  perform queue.defer(prefix || 'parked', lock => prefix || 'p');
  commit;
  perform queue._lock_admission(true);
  perform queue._admit(10);
  commit;
  perform queue.defer(prefix || 'not admitted') from generate_series(1, 3);
  perform queue.succeed(l.id, l.claim) from queue.active_job l join queue.job j on j.id = l.id where j.task = prefix || 'handed over';
  commit;
end $$;

-- The tasks that run once everything is released, with their numbers of jobs.
create function pg_temp.expected(prefix text) returns text language sql as $$
  select string_agg(format('%s%s %s', expected.prefix, t, n), ', ' order by t)
  from (values ('after the handover', 1), ('backlog', 60), ('needs', 1), ('not admitted', 3), ('parked', 1), ('ready', 1), ('slot', 3)) v (t, n)
$$;
create function pg_temp.ran(prefix text) returns text language sql as $$
  select string_agg(format('%s %s', r.task, r.n), ', ' order by r.task) from (select r.task, count(*) as n from ran r where starts_with(r.task, ran.prefix) group by 1) r
$$;
create procedure pg_temp.run_all() language plpgsql as $$
begin
  for i in 1 .. 20 loop
    perform pg_temp.run();
    commit;
  end loop;
end $$;
create function pg_temp.states(prefix text) returns text language sql as $$
  select string_agg(format('%s: %s', j.task, j.state), ', ' order by j.task, j.state) from queue.jobs j where starts_with(j.task, states.prefix)
$$;

-- Stored ids far ahead
call pg_temp.fill('a ');
select isnt_empty('select * from queue.backlog_part', 'there is a backlog to restore');
select isnt_empty('select * from queue.pending_settlement', 'and a pending settlement');
select pg_temp.states('a ') as before \gset
select pg_temp.shift(1000000000);
select is(pg_temp.states('a '), :'before'::text, 'restored before its time: every job has its state');
call pg_temp.run_all();
select is(pg_temp.ran('a '), pg_temp.expected('a '), 'nothing is lost, nothing doubled');
select is_empty('select * from queue.check()', 'every invariant holds');
select queue.defer('a new') \g /dev/null
select is(pg_temp.run(), 'a new', 'jobs deferred afterwards run');

-- Far behind: a cluster that has used more
call pg_temp.fill('b ');
-- (by no more than keeps their distances, however many transactions others had meanwhile)
select pg_temp.shift(3 - (select min(j.xid::text::bigint) from queue.job j where starts_with(j.task, 'b ')));
call pg_temp.run_all();
select is(pg_temp.ran('b '), pg_temp.expected('b '), 'stored ids far behind: nothing is lost, nothing doubled');
select is_empty('select * from queue.check()', 'every invariant holds');

-- Ahead by so little that some are ahead and some are not; the system identifier tells
call pg_temp.fill('c ');
select pg_temp.shift(4);
update queue.installation set system_identifier = 1;
select queue.register_worker('runner', info => '{"dead_after": "1 day"}') as worker \gset
call pg_temp.run_all();
select is(pg_temp.ran('c '), pg_temp.expected('c '), 'ids that straddle the present: nothing is lost, nothing doubled');
select is((select i.system_identifier from queue.installation i), (select c.system_identifier from pg_control_system() c), 'the installation knows its cluster');
select is_empty('select * from queue.check()', 'every invariant holds');
select queue.defer('c new') \g /dev/null
select is(pg_temp.run(), 'c new', 'jobs deferred afterwards run');

-- The same, noticed by tick
call pg_temp.fill('d ');
select pg_temp.shift(4);
update queue.installation set system_identifier = 1;
select queue.tick() \g /dev/null
call pg_temp.run_all();
select is(pg_temp.ran('d '), pg_temp.expected('d '), 'tick notices it as well');

-- A stored id that happens to be that of the transaction which restarts the cursor
begin;
update queue.job j set xid = pg_current_xact_id() where j.task = 'd held';
update queue.installation set system_identifier = 1;
select lives_ok('select queue.tick()', 'a job that waits is not admitted twice');
commit;

-- An open transaction while the cursor is started again
call pg_temp.fill('e ');
begin;
select queue.defer('e open');
prepare transaction 'restored';
select pg_temp.shift(1000000000);
call pg_temp.run_all();
select is(pg_temp.ran('e '), pg_temp.expected('e '), 'nothing is lost beside an open transaction');
commit prepared 'restored';
select is(pg_temp.run(), 'e open', 'which is admitted when it ends');

-- A restored subset: the log without some jobs that are in gates
begin;
delete from queue.job j where j.task = 'e scheduled';
select isnt_empty('select * from queue.check()', 'check reports what a subset lacks');
rollback;

-- Data restored over an installed queue: two cursors, the newer of which has passed jobs that the older has not
select queue.defer('f passed') \g /dev/null
insert into queue.cursor (tick, next_xid, in_flight, high_id, has_backlog, due_at)
select k.tick + 1000, pg_current_xact_id(), '{}', k.high_id, false, '-infinity' from queue.cursor k;
select set_eq('select c.problem, c.detail from queue.check() c', $$values ('not one row', 'cursor'), ('admitted, but in no table', 'flags 0')$$, 'check says so');
select queue._repair_cursor();
select is(pg_temp.run(), 'f passed', 'tick repairs it from time to time');
select is_empty('select * from queue.check()', 'every invariant holds');

-- A restore that has not ended: it adds primary keys last. Whoever comes first is refused, and nothing changes.
begin;
alter table queue.log drop constraint log_pkey;
update queue.installation set system_identifier = 1;
reset pgdefer.era;
select is(test.refusal(call), '55000', call)
from (values ('select queue.register_worker(''early'')'), ('select queue.tick()'), ('select queue.reap()'), (format('select queue.fetch(%s)', :worker)),
             ('select queue.install()')) v (call);
select is((select h.status || ': ' || h.detail from queue.health() h where h.name = 'version'),
  (select format('fail: code %s, tables %s; tables without their primary key: log', v.code, v.tables) from queue.version() v), 'health says so');
select is((select i.system_identifier from queue.installation i), 1::bigint, 'the next may begin the era');
delete from queue.installation;
select is(test.refusal($$select queue.register_worker('early')$$), '55000', 'also while the row is missing that holds the version');
select is(test.refusal('select queue.install()'), '55000', 'which install does not make');
rollback;
select lives_ok($$select queue.register_worker('in time')$$, 'with its keys it is complete');

-- Jobs that ran before are still running, with a worker from before, until they are reaped
select is((select count(*) from queue.jobs j where j.task like '_ running' and j.state = 'running'), 5::bigint, 'claims last');
update queue.worker set last_seen_at = now() - interval '1 hour', dead_after = '0';
select queue.reap() \g /dev/null
select is((select string_agg(distinct j.state, ', ') from queue.jobs j where j.task like '_ running'), 'ready', 'until their worker is reaped');
select is_empty('select * from queue.check()', 'every invariant holds');

select * from finish();
