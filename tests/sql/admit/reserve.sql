-- Jobs with several keys that go from line to line, and in the end reserve slots.

select plan(55);

set pgdefer.notify = off;
set statement_timeout = '20s';  -- a job that changes lines for ever is noticed

\ir slots.helpers.psql

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

create function pg_temp.defer(keys text[], priority integer default 0, task text default 'k', weight integer default 1,
  queue text default null) returns bigint language sql as $$
  select queue.defer(task, priority => priority, queue => queue, options => jsonb_build_object('concurrency', (
    select jsonb_agg(jsonb_build_object('key', k, 'limit', case when k = 'a3' then 3 else 1 end, 'weight', weight))
    from unnest(keys) k)))
$$;
create function pg_temp.fetch(queues text[] default null) returns bigint[] language sql as $$
  select array_agg(f.id) from queue.fetch((select max(w.id) from queue.workers w), queues, 100) f
$$;
-- Ends the running job of a key.
create function pg_temp.finish_key(key text) returns void language sql as $$
  select queue.finish_many(jsonb_agg(jsonb_build_object('id', j.id, 'claim', j.claim, 'outcome', 'succeeded')))
  from queue.active_job j where j.claim is not null
    and (select l.keys from queue.job l where l.id = j.id) @> array[key] having count(*) > 0
$$;
-- Ends the running jobs of a and b in turn, while others wait for each: until the job starts (how many of these
-- have passed it), or has reserved a slot. A procedure, because only committed jobs are admitted.
create procedure pg_temp.alternate(id bigint, until_reserved boolean, priority integer default 0, inout passed integer default 0)
language plpgsql as $$
declare
  v_started bigint[];
begin
  for i in 1 .. 30 loop
    perform pg_temp.defer(array['a'], priority), pg_temp.defer(array['b'], priority);
    commit;
    perform queue.tick();
    perform pg_temp.finish_key(case when i % 2 = 1 then 'a' else 'b' end);
    v_started := pg_temp.fetch();
    commit;
    exit when alternate.id = any (v_started)
      or until_reserved and (select w.reserved from queue.waiting w where w.id = alternate.id) is not null;
    passed := passed + coalesce(cardinality(v_started), 0);
  end loop;
end $$;
create function pg_temp.reserved(id bigint) returns text[] language sql as $$
  select w.reserved from queue.waiting w where w.id = reserved.id
$$;
create function pg_temp.used(key text) returns integer language sql as $$
  select s.used from queue.semaphores s where s.key = used.key
$$;
create function pg_temp.clear() returns void language plpgsql as $$
begin
  perform queue.cancel(j.id) from queue.jobs j where j.finished_at is null and j.state <> 'running';
  perform pg_temp.finish_all();
  perform queue.tick();
end $$;

-- Later jobs keep both keys full.
select pg_temp.defer('{a}'), pg_temp.defer('{b}') \g /dev/null
select pg_temp.fetch() \g /dev/null
select pg_temp.defer('{a,b}') as job \gset
call pg_temp.alternate(:job, false) \gset
select cmp_ok(:passed, '<=', 10, 'at most 10 later jobs pass a job of two keys');
select is((select j.state from queue.jobs j where j.id = :job), 'running', 'then it runs');
select is_empty('select * from queue.check()', 'all is sound');
select pg_temp.clear() \g /dev/null

-- Those of a lower priority pass it no longer.
select pg_temp.defer('{a}'), pg_temp.defer('{b}') \g /dev/null
select pg_temp.fetch() \g /dev/null
select pg_temp.defer('{b,a}', 5) as job \gset
call pg_temp.alternate(:job, false) \gset
select cmp_ok(:passed, '<=', 10, 'at most 10 of a lower priority pass it, whatever the order of its keys');
select is((select j.state from queue.jobs j where j.id = :job), 'running', 'then it runs');
select pg_temp.clear() \g /dev/null

-- Jobs of a higher priority pass it for as long as there are any, and it reserves nothing.
select pg_temp.defer('{a}'), pg_temp.defer('{b}') \g /dev/null
select pg_temp.fetch() \g /dev/null
select pg_temp.defer('{a,b}') as job \gset
call pg_temp.alternate(:job, true, 5) \gset
select is(:passed, 30, 'all jobs of a higher priority pass it');
select is(pg_temp.reserved(:job), null, 'and it has reserved nothing');
select is_empty('select * from queue.check()', 'all is sound');
select pg_temp.clear() \g /dev/null

-- What a reserved slot looks like.
select pg_temp.defer('{a}'), pg_temp.defer('{b}') \g /dev/null
select pg_temp.fetch() \g /dev/null
select pg_temp.defer('{a,b}') as job \gset
call pg_temp.alternate(:job, true) \gset
select cmp_ok(:passed, '>=', 4, 'a job reserves nothing before several have passed it');
select is(pg_temp.reserved(:job), '{ka}', 'then the slot of the key before the one that it waits for');
select is((select array_agg(l.keys) from queue.active_job j join queue.job l on l.id = j.id where j.claim is not null), '{{b}}',
  'nobody else gets it');
select is(pg_temp.used('a'), 1, 'it counts as used');
select w.lane from queue.waiting w where w.id = :job \gset
select is(queue._may_reserve(:lane, '{kc,kd}'), false, 'no other job of the lane reserves slots in the next seconds');
update queue.waiting w set reserved_at = w.reserved_at - interval '10 s' where w.id = :job;
select is((select array_agg(queue._may_reserve(:lane, k::text[]) order by k) from unnest('{"{ka,kc}","{kb,kc}","{kc,kd}"}'::text[]) k),
  '{f,f,t}', 'later only those do that have none of its keys');
select pg_temp.defer('{a}') as behind \gset
select queue.tick() \g /dev/null
select alike(queue.why(:behind), format('%%concurrency key a is full: job %s (reserved)', :job), 'why tells who has reserved it');
select is_empty('select * from queue.check()', 'all is sound');
select pg_temp.finish_key('b') \g /dev/null
select ok(:job = any (pg_temp.fetch()), 'it starts when the other key has a slot');
select is((select sum(s.used) from queue.semaphores s where s.key in ('a', 'b')), 2::bigint, 'and uses one slot of each');
select pg_temp.clear() \g /dev/null

-- Nobody serves its queue: once it is ready it holds no slot.
select pg_temp.defer('{a}'), pg_temp.defer('{b}') \g /dev/null
select pg_temp.fetch() \g /dev/null
select pg_temp.defer('{a,b}', queue => 'unserved') as job \gset
call pg_temp.alternate(:job, true) \g /dev/null
select pg_temp.finish_key('b') \g /dev/null
select is(cardinality(pg_temp.fetch('{default}')), 2, 'jobs of another queue get both slots');
select is((select j.state from queue.jobs j where j.id = :job), 'ready', 'while it is ready');
select is_empty('select * from queue.check()', 'all is sound');
select pg_temp.clear() \g /dev/null

-- A job that waits for a ready one of its queue reserves nothing, as maybe nobody serves that queue.
select pg_temp.defer('{a}'), pg_temp.defer('{b}') \g /dev/null
select pg_temp.fetch() \g /dev/null
select pg_temp.defer('{a,b}', queue => 'unserved') as job \gset
select queue.tick() \g /dev/null
update queue.waiting w set moves = 3 where w.id = :job;
select pg_temp.finish_key('b') \g /dev/null
select pg_temp.defer('{b}', queue => 'unserved') \g /dev/null
select queue.tick() \g /dev/null
select pg_temp.finish_key('a') \g /dev/null
select pg_temp.fetch('{default}') \g /dev/null
select is((select w.key || ' ' || coalesce(w.reserved::text, '-') from queue.waiting w where w.id = :job), 'kb -', 'behind a ready job it reserves nothing');
select is_empty('select * from queue.check()', 'all is sound');
select pg_temp.clear() \g /dev/null

-- Nor does one keep what it has reserved when its key has slots again: for a job that goes before it, or a rate.
create procedure pg_temp.begin_reserved(inout job bigint default null) language plpgsql as $$
declare
  v_ignored integer;
begin
  perform pg_temp.defer('{a}'), pg_temp.defer('{b}');
  commit;
  perform pg_temp.fetch();
  job := pg_temp.defer('{a,b}', queue => 'unserved');
  commit;
  call pg_temp.alternate(job, true, 0, v_ignored);
  -- none waits for b in another queue
  perform queue.cancel(w.id) from queue.waiting w where w.key = 'kb' and w.id <> job;
end $$;
call pg_temp.begin_reserved() \gset
select is(pg_temp.reserved(:job), '{ka}', 'a job has reserved a slot');
select queue.defer('first', queue => 'unserved', deadline => '2000-01-01Z', concurrency_key => 'b', concurrency_limit => 1) \g /dev/null
select queue.tick() \g /dev/null
select pg_temp.finish_key('b') \g /dev/null
select is(cardinality(pg_temp.fetch('{default}')), 1, 'another job gets it when one that goes before it is ready');
select is(pg_temp.reserved(:job), null, 'it is not reserved any more');
select is_empty('select * from queue.check()', 'all is sound');
select pg_temp.clear() \g /dev/null
select queue.configure_key('b', '{"rate": {"limit": 3, "per": "1 hour"}}') \g /dev/null
select pg_temp.defer('{a}'), pg_temp.defer('{b}') \g /dev/null
select pg_temp.fetch() \g /dev/null
select pg_temp.defer('{a,b}') as job \gset
call pg_temp.alternate(:job, true) \g /dev/null
select is(pg_temp.reserved(:job), '{ka}', 'a job waits for a running one');
select pg_temp.finish_key('b') \g /dev/null
select is(cardinality(pg_temp.fetch()), 1, 'another job gets the slot when it waits for a rate');
select alike(queue.why(:job), '%has used up its rate%', 'as it does');
select is_empty('select * from queue.check()', 'all is sound');
select queue.configure_key('b', '{"rate": null}') \g /dev/null
select pg_temp.clear() \g /dev/null

-- A job of a higher priority that is ready is no reason to reserve nothing: maybe no worker runs its task. One that waits is.
select pg_temp.defer('{b}', 5) \g /dev/null
select queue.tick() \g /dev/null
select l.lane from queue.lane l where l.queue = 'default' and l.priority = 0 \gset
select is(queue._is_outranked(:lane, '{kb}'), false, 'a more urgent job is ready');
select pg_temp.defer('{b}', 5) \g /dev/null
select queue.tick() \g /dev/null
select is(queue._is_outranked(:lane, '{kb}'), true, 'one waits');
select pg_temp.clear() \g /dev/null

-- Of three keys it reserves two, one after the other.
select pg_temp.defer('{a}'), pg_temp.defer('{b}'), pg_temp.defer('{c}') \g /dev/null
select pg_temp.fetch() \g /dev/null
select pg_temp.defer('{c,b,a}') as job \gset
call pg_temp.alternate(:job, true) \g /dev/null
select pg_temp.defer('{a}'), pg_temp.defer('{b}') \g /dev/null
select pg_temp.finish_key('b') \g /dev/null
select pg_temp.fetch() \g /dev/null
select is(pg_temp.reserved(:job), '{ka,kb}', 'a job of three keys waits for the last one');
select is_empty('select * from queue.check()', 'all is sound');
select pg_temp.finish_key('c') \g /dev/null
select is(pg_temp.fetch(), array[:job]::bigint[], 'and then starts');
select pg_temp.clear() \g /dev/null

-- Five jobs have often gone from line to line. The first of them reserves one of three slots, the others none.
select pg_temp.defer('{b}'), pg_temp.defer('{a3}'), pg_temp.defer('{a3}'), pg_temp.defer('{a3}') \g /dev/null
select pg_temp.fetch() \g /dev/null
select array_agg(pg_temp.defer('{a3,b}')) as jobs from generate_series(1, 5) \gset
select queue.tick() \g /dev/null
update queue.waiting w set moves = 3 where w.id = any (:'jobs');
select pg_temp.finish_key('a3') \g /dev/null
select pg_temp.fetch() \g /dev/null
select is((select string_agg(coalesce(w.reserved::text, '-'), ' ' order by w.id) from queue.waiting w), '{ka3} - - - -',
  'only the first that waits for a key reserves a slot of another');
select pg_temp.defer('{a3}'), pg_temp.defer('{a3}'), pg_temp.defer('{a3}') \g /dev/null
select is(cardinality(pg_temp.fetch()), 2, 'others get the rest');
select is_empty('select * from queue.check()', 'all is sound');
select pg_temp.clear() \g /dev/null

-- Where shares take turns, too.
create procedure pg_temp.pass_in_share(share text, inout job bigint default null, inout passed integer default 0)
language plpgsql as $$
declare
  v_shares text[] := '{}';
begin
  perform queue.defer('k', queue => 'shared', concurrency_key => k, concurrency_limit => 1, options => jsonb_build_object('share', share))
  from unnest(array['a', 'b']) k;
  commit;
  perform pg_temp.fetch();
  job := queue.defer('k', queue => 'shared', options => jsonb_build_object('share', share,
    'concurrency', '[{"key": "a", "limit": 1}, {"key": "b", "limit": 1}]'::jsonb));
  perform queue.defer('k', queue => 'shared', concurrency_key => k, concurrency_limit => 1, options => jsonb_build_object('share', share))
  from unnest(array['a', 'b']) k, generate_series(1, 20);
  commit;
  for i in 1 .. 40 loop
    perform pg_temp.finish_key(case when i % 2 = 1 then 'a' else 'b' end);
    exit when job = any (pg_temp.fetch());
    passed := passed + 1;
    commit;
  end loop;
end $$;
call pg_temp.pass_in_share('s') \gset
select cmp_ok(:passed, '<=', 10, 'at most 10 later jobs of its share pass a job of two keys');
select is_empty('select * from queue.check()', 'all is sound');
select pg_temp.clear() \g /dev/null
select queue.prune() \g /dev/null

-- A heavy job waits for all slots of h, of which jobs of another queue take each that becomes free.
select queue.configure_key('h', '{"limit": 2}') \g /dev/null
create function pg_temp.defer_h(weight integer, queue text default null) returns bigint language sql as $$
  select queue.defer('k', queue => queue, options => jsonb_build_object('concurrency', jsonb_build_array(
    jsonb_build_object('key', 'h', 'limit', 2, 'weight', weight))
    || case when weight = 2 then '[{"key": "a", "limit": 1}]' else '[]' end::jsonb))
$$;
create procedure pg_temp.pass_heavy(inout job bigint default null, inout rounds integer default 0) language plpgsql as $$
begin
  perform pg_temp.defer('{a}'), pg_temp.defer_h(1), pg_temp.defer_h(1);
  commit;
  perform pg_temp.fetch();
  job := pg_temp.defer_h(2);
  commit;
  for i in 1 .. 30 loop
    perform pg_temp.defer('{a}'), pg_temp.defer_h(1, 'other'), pg_temp.defer_h(1, 'other');
    commit;
    perform queue.tick();
    perform pg_temp.finish_key(case when i % 2 = 1 then 'a' else 'h' end);
    perform pg_temp.fetch();
    commit;
    exit when pg_temp.reserved(job) is not null;
  end loop;
  assert pg_temp.reserved(job) = '{ka}';
  for i in 1 .. 20 loop
    exit when pg_temp.reserved(job) is null;
    rounds := i;
    perform pg_temp.defer_h(1, 'other');
    commit;
    perform queue.tick();
    perform queue.succeed(j.id, j.claim) from (select j.id, j.claim from queue.jobs j join queue.job l on l.id = j.id
      where j.state = 'running' and l.keys @> '{h}' limit 1) j;
    perform pg_temp.fetch('{other}');
    commit;
  end loop;
end $$;
call pg_temp.pass_heavy() \gset
select is(pg_temp.reserved(:job), null, 'a heavy job that others pass gives back what it has reserved');
select ok(:rounds between 2 and 10, 'but not at once');
select is_empty('select * from queue.check()', 'all is sound');
select pg_temp.clear() \g /dev/null

-- Those that arrive later and go before it get what it has reserved.
create procedure pg_temp.arrives(options jsonb, priority integer, inout state text default null) language plpgsql as $$
declare
  v_job bigint;
  v_first bigint;
  v_ignored integer;
begin
  perform pg_temp.clear();
  perform pg_temp.defer('{a}'), pg_temp.defer('{b}');
  commit;
  perform pg_temp.fetch();
  v_job := pg_temp.defer('{a,b}');
  commit;
  call pg_temp.alternate(v_job, true, 0, v_ignored);
  assert pg_temp.reserved(v_job) = '{ka}';
  perform queue.cancel(w.id) from queue.waiting w where w.key = 'ka';
  v_first := queue.defer('first', priority => priority, deadline => (options ->> 'deadline')::timestamptz,
    concurrency_key => 'a', concurrency_limit => 1, options => options - 'deadline');
  commit;
  perform pg_temp.fetch();
  assert not exists (select from queue.check());
  state := (select j.state from queue.jobs j where j.id = v_first);
end $$;
call pg_temp.arrives('{}', 5) \gset
select is(:'state'::text, 'running', 'one of a higher priority');
call pg_temp.arrives('{"on_limit": "discard"}', 5) \gset
select is(:'state'::text, 'running', 'so it is not discarded');
call pg_temp.arrives('{"deadline": "2999-01-01Z"}', 0) \gset
select is(:'state'::text, 'running', 'one with a deadline');
call pg_temp.arrives('{}', 0) \gset
select is(:'state'::text, 'blocked', 'others do not');
call pg_temp.arrives('{}', -5) \gset
select is(:'state'::text, 'blocked', 'nor those of a lower priority');
select pg_temp.clear() \g /dev/null

-- One that has not often changed lines is the first in the line, and the others behind it reserve nothing, either.
select pg_temp.defer('{b}'), pg_temp.defer('{a3}'), pg_temp.defer('{a3}'), pg_temp.defer('{a3}') \g /dev/null
select pg_temp.fetch() \g /dev/null
select array_agg(pg_temp.defer('{a3,b}')) as jobs from generate_series(1, 5) \gset
select queue.tick() \g /dev/null
update queue.waiting w set moves = 3 where w.id = any (:'jobs') and w.id > (select min(o.id) from queue.waiting o);
select pg_temp.finish_key('a3') \g /dev/null
select pg_temp.fetch() \g /dev/null
select is((select count(w.reserved) from queue.waiting w), 0::bigint, 'nor do those behind the first');
select pg_temp.clear() \g /dev/null

-- A job that leaves its line gives the slot back, whatever takes it out.
create procedure pg_temp.starts_after(change text, inout starts boolean default null) language plpgsql as $$
declare
  v_job bigint;
  v_next bigint;
  v_ignored integer;
begin
  perform pg_temp.clear();
  perform pg_temp.defer('{a}'), pg_temp.defer('{b}');
  commit;
  perform pg_temp.fetch();
  v_job := pg_temp.defer('{a,b}', task => 'special');
  commit;
  call pg_temp.alternate(v_job, true, 0, v_ignored);
  assert pg_temp.reserved(v_job) is not null;
  select min(w.id) into v_next from queue.waiting w join queue.job j on j.id = w.id where j.keys = '{a}';
  execute format(change, v_job);
  commit;
  assert not exists (select from queue.check());
  starts := v_next = any (pg_temp.fetch());
end $$;
call pg_temp.starts_after('select queue.cancel(%s)') \gset
select ok(:'starts', 'select queue.cancel');
call pg_temp.starts_after('select queue.hold(%s)') \gset
select ok(:'starts', 'select queue.hold');
call pg_temp.starts_after('select queue.reschedule(%s, clock_timestamp() + interval ''1 hour'')') \gset
select ok(:'starts', 'select queue.reschedule');
call pg_temp.starts_after('select queue.delete(array[%s], true)') \gset
select ok(:'starts', 'select queue.delete');
call pg_temp.starts_after('select queue.pause(task => ''special''), %s') \gset
select ok(:'starts', 'select queue.pause');
select queue.resume(task => 'special') \g /dev/null
select * from finish();
