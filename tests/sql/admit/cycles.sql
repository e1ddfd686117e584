-- A job can't wait for one that waits behind it for its own lock: both would wait for ever.

select plan(38);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

create function pg_temp.defer(lock text, mode text, more jsonb default '{}', needs bigint[] default null) returns bigint language sql as $$
  select queue.defer('t', lock => defer.lock, needs => defer.needs, options => more || case when mode is null then '{}' else jsonb_build_object('lock_mode', mode) end)
$$;
\ir ../work/claim.helpers.psql
-- What becomes of a job that waits for another one.
create function pg_temp.refusal(statement text, variadic ids bigint[]) returns text language plpgsql as $$
declare
  v_detail text;
  v_hint text;
begin
  execute format(statement, variadic ids);
  return 'waits';
exception when sqlstate 'QJ005' then
  get stacked diagnostics v_detail = pg_exception_detail, v_hint = pg_exception_hint;
  return concat_ws(' ', sqlerrm || ':', v_detail || '.', v_hint);
end $$;
create procedure pg_temp.clear() language sql as $$
  select queue.cancel(j.id, abort => true) from queue.jobs j where j.finished_at is null;
  select queue.delete(array(select j.id from queue.jobs j), true)
$$;

-- A parent and its child
select pg_temp.defer('L', 'ordered') as p \gset
select pg_temp.claim(:p) as claim \gset
select pg_temp.defer('L', 'ordered') as c \gset
select is(pg_temp.refusal('select queue.await_jobs(%s, %s, ''aw'', array[%s])', :p, :claim, :c), 'the new need would create a dependency cycle:'
  || format(' job %s waits behind job %s for lock L.', :c, :p) || ' A job keeps its place in its lock while it waits. Give the other job another lock, or none.', 'a job can''t await one that waits behind it');
select is(pg_temp.refusal('select queue.retry_later(%s, %s, needs => array[%s])', :p, :claim, :c) ~ 'cycle', true, 'nor need it');
select is((select concat_ws(' ', j.state, j.claims, (select count(*) from queue.step s where s.job_id = j.id)) from queue.jobs j where j.id = :p), 'running 1 0', 'which changes nothing');
select is((select f.error from queue.finish_many(jsonb_build_array(jsonb_build_object('id', :p, 'claim', :claim, 'outcome', 'retry_later', 'needs', array[:c]))) f), 'QJ005', 'finish_many reports it in its row');
select pg_temp.defer(null, null, needs => array[:c]) as needs_c, pg_temp.defer(null, null, '{"needs_mode": "any"}', array[:c]) as needs_any \gset
select alike(pg_temp.refusal('select queue.await_jobs(%s, %s, ''aw'', array[%s])', :p, :claim, :needs_c), '% job ' || :c || ' waits behind %', 'nor one that needs such a job');
select is(pg_temp.refusal('select queue.await_jobs(%s, %s, ''aw'', array[%s])', :p, :claim, :needs_any), 'waits', 'one that needs any of several, it may');
call pg_temp.clear();

-- Jobs for which the lock is no obstacle
select pg_temp.defer('L', 'ordered') as older, pg_temp.defer('L', 'ordered') as p, pg_temp.defer('other', 'ordered') as other, pg_temp.defer(null, null) as none \gset
select queue.cancel(:older) \g /dev/null
select pg_temp.claim(:p) as claim \gset
select is(pg_temp.refusal('select queue.await_jobs(%s, %s, ''aw'', array[%s, %s, %s])', :p, :claim, :older, :other, :none), 'waits', 'another lock, no lock, and one that has ended');
select queue.succeed(:other, pg_temp.claim(:other)), queue.succeed(:none, pg_temp.claim(:none)) \g /dev/null
select pg_temp.claim(:p) as claim \gset
select is((select r.outcome from queue.retry(array[:older]) r), 'blocked', 'an older one of its lock, which is retried,');
select is(pg_temp.refusal('select queue.await_jobs(%s, %s, ''older'', array[%s])', :p, :claim, :older), 'waits', 'goes first');
select queue.succeed(:older, pg_temp.claim(:older)) \g /dev/null
select pg_temp.claim(:p) as claim \gset
select isnt(:claim, null, 'so the younger one continues');
select pg_temp.defer('L', 'ordered') as c \gset
select queue.cancel(:c) \g /dev/null
select is(pg_temp.refusal('select queue.await_jobs(%s, %s, ''ended'', array[%s])', :p, :claim, :c), 'waits', 'a younger one that has ended holds up nobody');
call pg_temp.clear();
select pg_temp.defer('L', 'ordered', '{"needs_mode": "any"}') as p \gset
select pg_temp.claim(:p) as claim \gset
select pg_temp.defer('L', 'ordered') as c, pg_temp.defer(null, null) as n \gset
select is(pg_temp.refusal('select queue.retry_later(%s, %s, needs => array[%s, %s])', :p, :claim, :c, :n), 'waits', 'a job that waits for any of several may name such a one');
call pg_temp.clear();

-- An older one of its lock, behind another one that is even older
select queue.defer('t', lock => 'L', scheduled_at => now() + interval '1 hour') as oldest, pg_temp.defer('L', 'ordered') as older, pg_temp.defer('L', 'mutex') as p \gset
select pg_temp.claim(:p) as claim \gset
select is(pg_temp.refusal('select queue.await_jobs(%s, %s, ''aw'', array[%s])', :p, :claim, :older), 'waits', 'an older one goes first, whoever is before it');
call pg_temp.clear();

-- Whether a job may wait for a younger one of its lock, by their modes, and what that one then does
select pg_temp.defer('L', 'mutex') as p \gset
select pg_temp.claim(:p) as claim \gset
select pg_temp.defer('L', 'mutex') as mutex, pg_temp.defer('L', 'ordered') as ordered \gset
select alike(pg_temp.refusal('select queue.await_jobs(%s, %s, ''aw'', array[%s])', :p, :claim, :ordered), '%cycle%', 'an ordered job waits for an older mutex job too');
select is(pg_temp.refusal('select queue.await_jobs(%s, %s, ''aw'', array[%s])', :p, :claim, :mutex), 'waits', 'a mutex job may await a mutex job');
select isnt(pg_temp.claim(:mutex), null, 'which runs meanwhile');
call pg_temp.clear();
select pg_temp.defer('L', 'ordered') as p \gset
select pg_temp.claim(:p) as claim \gset
select pg_temp.defer('L', 'mutex') as mutex \gset
select is(pg_temp.refusal('select queue.await_jobs(%s, %s, ''aw'', array[%s])', :p, :claim, :mutex), 'waits', 'so may an ordered job');
select pg_temp.claim(:mutex) as claim \gset
select isnt(:claim, null, 'it runs');
select queue.succeed(:mutex, :claim) \g /dev/null
select isnt(pg_temp.claim(:p), null, 'and the other one continues');
call pg_temp.clear();
select queue.defer('t', concurrency_key => 'K', concurrency_limit => 1) as p \gset
select pg_temp.claim(:p) as claim \gset
select queue.defer('t', concurrency_key => 'K', concurrency_limit => 1) as c \gset
select is(pg_temp.refusal('select queue.await_jobs(%s, %s, ''aw'', array[%s])', :p, :claim, :c), 'waits', 'a concurrency key holds up neither');
select isnt(pg_temp.claim(:c), null, 'because the slot is free meanwhile');
call pg_temp.clear();

-- A holder further up: the parent of the parent, and a job that has not started and needs it
select pg_temp.defer('L', 'ordered') as top \gset
select pg_temp.claim(:top) as claim \gset
select pg_temp.defer(null, null) as p, pg_temp.defer(null, null, '{"needs_mode": "any"}') as loose \gset
select queue.await_jobs(:top, :claim, 'p', array[:p]) \g /dev/null
select pg_temp.claim(:p) as claim \gset
select pg_temp.defer('L', 'ordered') as c, pg_temp.defer('L', 'mutex') as mutex, pg_temp.defer('M', 'ordered') as other \gset
select alike(pg_temp.refusal('select queue.await_jobs(%s, %s, ''aw'', array[%s])', :p, :claim, :c), '%: job ' || :c || ' waits behind job ' || :top || ' for lock L.%', 'nor for one behind a job that waits for it');
select is(pg_temp.refusal('select queue.await_jobs(%s, %s, ''aw'', array[%s, %s])', :p, :claim, :mutex, :other), 'waits', 'a mutex job and other locks are no obstacle');
call pg_temp.clear();
select pg_temp.defer(null, null) as p \gset
select pg_temp.claim(:p) as claim \gset
select pg_temp.defer('L', 'ordered', needs => array[:p]) as needing, pg_temp.defer('M', 'ordered', '{"needs_mode": "any"}', array[:p]) as any \gset
select pg_temp.defer('L', 'ordered') as c, pg_temp.defer('M', 'ordered') as d \gset
select queue.tick() \g /dev/null
select alike(pg_temp.refusal('select queue.await_jobs(%s, %s, ''aw'', array[%s])', :p, :claim, :c), '%: job ' || :c || ' waits behind job ' || :needing || ' for lock L.%', 'also if that one needs it from the beginning');
select is(pg_temp.refusal('select queue.await_jobs(%s, %s, ''aw'', array[%s])', :p, :claim, :d), 'waits', 'one that needs any of several holds up nobody for good');
call pg_temp.clear();
select queue.defer('t', lock => 'L', scheduled_at => now() + interval '1 hour') as oldest, pg_temp.defer('L', 'mutex') as top \gset
select pg_temp.claim(:top) as claim \gset
select pg_temp.defer(null, null) as p \gset
select queue.await_jobs(:top, :claim, 'p', array[:p]) \g /dev/null
select queue.cancel(:top) \g /dev/null
select pg_temp.claim(:p) as claim \gset
select pg_temp.defer('L', 'ordered') as c \gset
select is(pg_temp.refusal('select queue.await_jobs(%s, %s, ''aw'', array[%s])', :p, :claim, :c), 'waits', 'a holder that has ended is none');
call pg_temp.clear();

-- A retry changes the lock
select pg_temp.defer('L', 'ordered') as p, pg_temp.defer('other', 'ordered') as c \gset
select queue.fail(:c, pg_temp.claim(:c), 'x', null, '{"retry_in": 0, "retryable": true, "lock": "L"}') \g /dev/null
select pg_temp.claim(:p) as claim \gset
select alike(pg_temp.refusal('select queue.await_jobs(%s, %s, ''aw'', array[%s])', :p, :claim, :c), '%cycle%', 'the lock that a job has now counts');
select queue.succeed(:p, :claim) \g /dev/null
select isnt(pg_temp.claim(:c), null, 'without the wait, all go on');
call pg_temp.clear();

-- Waits that are not settled yet, of several jobs for several, in another order than that of their ids
select queue.defer('t', lock => 'L') as a, queue.defer('t') as b, queue.defer('t') as c, queue.defer('t') as d, queue.defer('t') as x, queue.defer('t') as y \gset
select pg_temp.claim(:a) as claim_a, pg_temp.claim(:b) as claim_b, pg_temp.claim(:c) as claim_c, pg_temp.claim(:d) as claim_d \gset
select queue.await_jobs(:c, :claim_c, 'aw', array[:x, :d, :y]), queue.await_jobs(:a, :claim_a, 'aw', array[:y, :b]), queue.await_jobs(:b, :claim_b, 'aw', array[:x, :c]) \g /dev/null
select queue.defer('t', lock => 'L') as behind, queue.defer('t', lock => 'M') as other \gset
select is((select count(*) from queue.need), 0::bigint, 'three jobs wait, which is not settled yet');
select alike(pg_temp.refusal('select queue.await_jobs(%s, %s, ''aw'', array[%s])', :d, :claim_d, :a), format('%% path: %s -> %s -> %s -> %s -> %s.%%', :d, :a, :b, :c, :d), 'a cycle by way of all three');
select alike(pg_temp.refusal('select queue.await_jobs(%s, %s, ''aw'', array[%s])', :d, :claim_d, :behind), '% job ' || :behind || ' waits behind job ' || :a || ' for lock L.%', 'a lock by way of all three');
select is(pg_temp.refusal('select queue.await_jobs(%s, %s, ''aw'', array[%s, %s, %s])', :d, :claim_d, :x, :y, :other), 'waits', 'other jobs are no obstacle');
call pg_temp.clear();

-- A job awaits another one even if it needs only any of its needs, or none any more. Settled and not.
select queue.defer('t') as done \gset
select queue.succeed(:done, pg_temp.claim(:done));
create temp table cycles (mode text, ignores boolean, is_settled boolean, said text);
create procedure pg_temp.cycle(lock text, mode text, ignores boolean, is_settled boolean, done bigint) language plpgsql as $$
declare
  v_holder bigint;
  v_between bigint;
  v_behind bigint;
  v_holder_claim bigint;
  v_claim bigint;
begin
  v_holder := queue.defer('t', lock => lock, needs => array[done], options => jsonb_build_object('needs_mode', case mode when 'holder' then 'any' else 'all' end));
  v_between := queue.defer('t', needs => array[done], options => jsonb_build_object('needs_mode', case mode when 'between' then 'any' else 'all' end));
  v_behind := queue.defer('t', lock => lock);
  commit;
  v_holder_claim := pg_temp.claim(v_holder);
  v_claim := pg_temp.claim(v_between);
  if ignores then
    perform queue.retry_later(v_between, v_claim, needs => null);
    commit;
    v_claim := pg_temp.claim(v_between);
  end if;
  if mode = 'holder' then
    perform queue.await_jobs(v_holder, v_holder_claim, 'aw', array[v_between]);
  else
    perform queue.await_jobs(v_between, v_claim, 'aw', array[v_behind]);
  end if;
  commit;
  if is_settled then
    perform queue.tick();
    commit;
  end if;
  insert into cycles values (mode, ignores, is_settled, case when mode = 'holder'
    then pg_temp.refusal('select queue.await_jobs(%s, %s, ''aw'', array[%s])', v_between, v_claim, v_behind)
    else pg_temp.refusal('select queue.await_jobs(%s, %s, ''aw'', array[%s])', v_holder, v_holder_claim, v_between) end);
end $$;
call pg_temp.cycle('1', 'none', true, true, :done);
call pg_temp.cycle('2', 'none', true, false, :done);
call pg_temp.cycle('3', 'between', false, true, :done);
call pg_temp.cycle('4', 'between', false, false, :done);
call pg_temp.cycle('5', 'holder', false, true, :done);
call pg_temp.cycle('6', 'holder', false, false, :done);
select is((select count(*) from cycles c where c.said like 'the new need would create a dependency cycle:%'), 6::bigint, 'so such cycles are refused, too');
call pg_temp.clear();

-- Walks: how often the needs of a job are looked up
create function pg_temp.lookups() returns bigint language sql as $$ select s.idx_scan from pg_stat_xact_user_tables s where s.relid = 'queue.need'::regclass $$;
select queue.defer('t') as first \gset
do $$
declare
  v_ids bigint[] := array[(select max(j.id) from queue.job j)];
begin
  for k in 1 .. 200 loop
    v_ids := v_ids || queue.defer('t', needs => v_ids[greatest(k - 1, 1):]);
  end loop;
end $$;
select max(j.id) as last from queue.job j \gset
select pg_temp.claim(:first) as claim \gset
begin;
select pg_temp.lookups() as before \gset
select is(pg_temp.refusal('select queue.retry_later(%s, %s, needs => array[%s])', :first, :claim, :last), 'the new need would create a dependency cycle: path: '
  || (select :first || string_agg(' -> ' || :last - 2 * n, '' order by n) from generate_series(0, 8) n) || ' -> ... (82 more)'
  || (select string_agg(' -> ' || :first + 2 * n, '' order by n desc) from generate_series(0, 9) n) || '. A job can''t need a job that needs it, directly or through others.',
  'the shortest of many ways, whose middle is left out');
select cmp_ok(pg_temp.lookups() - :before, '<=', 4 * 200::bigint, 'is found without looking at a job once for each way to it');
rollback;
select pg_temp.defer('L', 'ordered') as c \gset
begin;
select pg_temp.lookups() as before \gset
select is(pg_temp.refusal('select queue.await_jobs(%s, %s, ''aw'', array[%s])', :first, :claim, :c), 'waits', 'a job that 200 need may wait for one with a lock');
select cmp_ok(pg_temp.lookups() - :before, '<', 20::bigint, 'and if nobody is before that one, they are not looked at');
commit;
call pg_temp.clear();
select is_empty('select * from queue.check()', 'all is sound');

select * from finish();
