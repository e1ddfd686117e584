-- retry_later: which needs it waits for, what it returns, max_progress, cycles.
-- The races are in cycles.two_yields.spec and needs.*.spec.

select plan(86);

\ir needs.helpers.psql

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- retry_later, all: waits for all of its needs
select pg_temp.defer(t) from unnest('{a,b,j}'::text[]) t \g /dev/null
select is(pg_temp.run('j', 'retry_later', jsonb_build_object('needs', pg_temp.ids('a'))), 'waiting', 'a running job adds a need');
select is(pg_temp.states(), 'a:ready b:ready j:waiting', 'and waits');
select is(pg_temp.run('a'), 'succeeded', 'it ends');
select is(pg_temp.run('j', 'retry_later', jsonb_build_object('needs', pg_temp.ids('b'))), 'waiting', 'called again, it adds another');
select is((select j.needs from queue.jobs j where j.task = 'j'), array[pg_temp.id('a'), pg_temp.id('b')], 'they add up');
select is(pg_temp.run('b'), 'succeeded', 'it ends');
select is(pg_temp.run('j', 'retry_later', '{"needs": []}'), 'ready', 'without needs it is called again at once');
select is(pg_temp.run('j', 'retry_later'), 'ready', 'the same');
select is(pg_temp.run('j', 'retry_later', jsonb_build_object('at', clock_timestamp() + interval '1 hour')), 'scheduled', 'or later');
select is((select concat_ws(' ', j.state, j.attempts, j.failures, j.progress) from queue.jobs j where j.task = 'j'), 'scheduled 5 0 5', 'a yield is progress, not a failure');
call pg_temp.clear();

-- retry_later after a failure waits nevertheless; needs => NULL does not
select pg_temp.defer(t) from unnest('{a,j}'::text[]) t \g /dev/null
select is(pg_temp.run('j', 'failed', '{"options": {"retry_in": 0}}'), 'ready', 'a job fails and is retried');
select is(pg_temp.run('j', 'retry_later', jsonb_build_object('needs', pg_temp.ids('a'))), 'waiting', 'then adds a need');
select is(pg_temp.states(), 'a:ready j:waiting', 'and waits for it');
select is((select r.outcome from queue.retry(array[pg_temp.id('j')]) r), 'waiting', 'a retry by hand does not free it');
select is(queue.cancel(pg_temp.id('j')), 'cancelled', 'it is cancelled');
select is((select r.outcome from queue.retry(array[pg_temp.id('j')]) r), 'waiting', 'nor when it has ended');
select is(pg_temp.run('a', 'failed'), 'failed', 'the need fails');
select is(pg_temp.states(), 'a:failed j:upstream_failed', 'as for any need');
select is((select r.outcome from queue.retry(array[pg_temp.id('a')]) r), 'ready', 'it is retried');
select is(pg_temp.run('a'), 'succeeded', 'and succeeds');
select is(pg_temp.run('j'), 'succeeded', 'so it continues');
call pg_temp.clear();
select pg_temp.defer('a'), pg_temp.defer('b') \g /dev/null
select pg_temp.defer('j', 'a b', 'any') \g /dev/null
select is(pg_temp.run('a'), 'succeeded', 'one of two');
select is(pg_temp.run('j', 'retry_later', '{"needs": null}'), 'ready', 'NULL: whatever its needs are');
select is(pg_temp.run('j', 'failed', '{"options": {"retry_in": 0}}'), 'ready', 'a failure repeats the run');
select is(pg_temp.run('j', 'retry_later', '{"needs": []}'), 'waiting', 'an empty list waits for the remaining needs');
select is(pg_temp.run('j', 'none'), 'not ready', 'the other');
select is(pg_temp.run('b'), 'succeeded', 'which ends');
select is(pg_temp.run('j', 'retry_later', '{"needs": []}'), 'ready', 'none is left: at once');
call pg_temp.clear();

-- any: waits for a need that was not satisfied when the run began
select pg_temp.defer(t) from unnest('{a,b,c}'::text[]) t \g /dev/null
select pg_temp.defer('j', 'a b c', 'any') \g /dev/null
select is(pg_temp.run('a'), 'succeeded', 'a need');
select is(pg_temp.run('j', 'none'), 'running', 'lets it run');
select is(pg_temp.run('b'), 'succeeded', 'one that ends meanwhile');
select is(pg_temp.finish('j', 'retry_later', '{"needs": []}'), 'ready', 'has it called again at once');
select is(pg_temp.run('j', 'retry_later', '{"needs": []}'), 'waiting', 'then it waits for the last');
select is(pg_temp.run('c', 'failed'), 'failed', 'which fails');
select is(pg_temp.states(), 'a:succeeded b:succeeded c:failed j:waiting', 'not all have failed, so it is not doomed');
select is((select r.outcome from queue.retry(array[pg_temp.id('c')]) r), 'ready', 'which is retried');
select is(pg_temp.run('c'), 'succeeded', 'and succeeds');
select is(pg_temp.run('j'), 'succeeded', 'so that it can end');
call pg_temp.clear();
select pg_temp.defer(t) from unnest('{a,b,c}'::text[]) t \g /dev/null
select pg_temp.defer('j', 'a b c', 'any') \g /dev/null
select is(pg_temp.run('a'), 'succeeded', 'a need');
select is(pg_temp.run('j', 'retry_later', '{"needs": []}'), 'waiting', 'of a job that then waits for one of two');
select is((select outcome from queue.delete(array[pg_temp.id('b')], true)), 'deleted', 'one is deleted by force');
select is(pg_temp.states(), 'a:succeeded c:ready j:waiting', 'it waits for the other');
select is(pg_temp.run('c', 'failed'), 'failed', 'which fails');
select is((select outcome from queue.delete(array[pg_temp.id('c')], true)), 'deleted', 'and is deleted too');
select is(pg_temp.states(), 'a:succeeded j:ready', 'none is left that may still succeed: at once');
select is((select string_agg(n.state, ' ' order by n.need_id) from queue.needs(pg_temp.id('j')) n), 'succeeded deleted deleted', 'it is told what became of them');
select is(pg_temp.run('j', 'retry_later', '{"needs": []}'), 'ready', 'nor does a later yield wait for them');
call pg_temp.clear();
select pg_temp.defer('j', mode => 'any') \g /dev/null
select is(pg_temp.run('j', 'none'), 'running', 'a job without needs begins');
select pg_temp.defer('new') \g /dev/null
select is(pg_temp.finish('j', 'retry_later', jsonb_build_object('needs', pg_temp.ids('new'))), 'waiting', 'and names one that it has deferred');
select is(pg_temp.states(), 'j:waiting new:ready', 'it waits');
select is(pg_temp.run('new'), 'succeeded', 'it ends');
select is(pg_temp.run('j', 'released'), 'ready', 'a release undoes the run');
select is(pg_temp.run('j'), 'succeeded', 'and it is called again');
call pg_temp.clear();
select pg_temp.defer('h', more => '{"held": true}'), pg_temp.defer('b') \g /dev/null
select pg_temp.defer('j', 'h b', 'any', 'proceed') \g /dev/null
select is(pg_temp.run('j', 'retry_later', '{"needs": []}'), 'waiting', 'under proceed a held need was satisfied when the run began');
select is(pg_temp.states(), 'h:held b:ready j:waiting', 'so it is not called again for that');
select is(queue.unhold(pg_temp.id('h')), 'ready', 'let go');
select is(pg_temp.run('h'), 'succeeded', 'it may end');
select is(pg_temp.states(), 'h:succeeded b:ready j:waiting', 'the other is waited for');
call pg_temp.clear();

-- any, after a yield: the deletion of the last open need leaves nothing to wait for, although another need, which was
-- satisfied when the run began, is pending again
call pg_temp.clear();
select pg_temp.defer('a'), pg_temp.defer('c') \g /dev/null
select pg_temp.defer('j', 'a c', 'any') \g /dev/null
select pg_temp.states() \g /dev/null
select queue.done(array[pg_temp.id('c')]) \g /dev/null
select is(pg_temp.run('j', 'retry_later'), 'waiting', 'it waits for the open need');
select queue.retry(array[pg_temp.id('c')]) \g /dev/null
select queue.delete(array[pg_temp.id('a')], true) \g /dev/null
select is(pg_temp.states(), 'c:ready j:ready', 'and no longer once that is deleted');
select is_empty('select * from queue.check()', 'in order');
call pg_temp.clear();

-- retry_later returns the state that the job then has, whatever happened to its needs while it ran
create temp table said (mode text, failure text, a text, b text, is_late boolean, said text, state text);
create procedure pg_temp.become(task text, state text) language plpgsql as $$
declare
  v_id bigint := pg_temp.id(become.task);
  v_is_over boolean := (select j.state = 'succeeded' from queue.jobs j where j.id = v_id);
begin
  if v_is_over and become.state not in ('succeeded', 'deleted') then
    perform queue.retry(array[v_id]);
    commit;
  end if;
  case
    when become.state = 'held' then
      perform queue.hold(v_id);
    when become.state = 'deleted' then
      perform queue.delete(array[v_id], true);
    when become.state = 'failed' or become.state = 'succeeded' and not v_is_over then
      perform pg_temp.run(become.task, become.state);
    else
  end case;
  commit;
end $$;
create procedure pg_temp.try_yields() language plpgsql as $$
declare
  v record;
  v_said text;
begin
  for v in
    select m.mode, f.failure, a.state as a, b.state as b, l.is_late
    from unnest('{all,any}'::text[]) m (mode) cross join unnest('{block,proceed}'::text[]) f (failure)
    cross join unnest('{succeeded,failed,held,ready,deleted}'::text[]) a (state) cross join unnest('{succeeded,failed,held,ready,deleted}'::text[]) b (state)
    cross join unnest('{f,t}'::boolean[]) l (is_late)
    where m.mode = 'any' or not l.is_late
  loop
    call pg_temp.clear();
    commit;
    perform pg_temp.defer('a'), pg_temp.defer('b');
    commit;
    perform pg_temp.run('a'), case when not v.is_late then pg_temp.run('b') end;
    commit;
    perform pg_temp.defer('j', 'a b', v.mode, v.failure);
    commit;
    perform pg_temp.run('j', 'none');
    commit;
    call pg_temp.become('a', v.a);
    call pg_temp.become('b', v.b);
    v_said := pg_temp.finish('j', 'retry_later', '{"needs": []}');
    commit;
    perform queue.tick();
    commit;
    insert into said select v.mode, v.failure, v.a, v.b, v.is_late, v_said, j.state from queue.jobs j where j.task = 'j';
  end loop;
  call pg_temp.clear();
end $$;
call pg_temp.try_yields();
select is((select string_agg(distinct s.state, ' ') || ' ' || count(*) from said s), 'ready upstream_failed waiting 150', 'all ends of two needs');
select is_empty('select * from said s where s.said <> s.state', 'retry_later has reported');

-- max_progress
select pg_temp.defer('j', more => '{"max_progress": 1}') \g /dev/null
select is(pg_temp.run('j', 'retry_later'), 'ready', 'one yield is allowed');
select is(pg_temp.run('j', 'retry_later'), 'failed', 'the second is too much');
select is((select j.reason from queue.jobs j where j.task = 'j'), 'max_progress', 'and says so');
call pg_temp.clear();

-- A job that is needed, by such a yield, before it is admitted: a session that expects only newcomers claims it.
select pg_temp.defer('j') \g /dev/null
select is(pg_temp.run('j', 'none'), 'running', 'a job runs');
select pg_temp.defer('a') \g /dev/null
select pg_temp.finish('j', 'retry_later', jsonb_build_object('needs', pg_temp.ids('a'))) \g /dev/null
set pgdefer.was_dry = on;
select is((select string_agg(f.task, ' ') from queue.fetch(:worker) f), 'a', 'the needed one starts');
select pg_temp.finish('a') \g /dev/null
select is((select string_agg(f.task, ' ') from queue.fetch(:worker) f), 'j', 'and its end lets the other one continue');
select pg_temp.finish('j') \g /dev/null
call pg_temp.clear();

-- Cycles
select pg_temp.defer('a') \g /dev/null
select pg_temp.defer('b', 'a') \g /dev/null
select pg_temp.defer('c', 'b') \g /dev/null
select is(pg_temp.run('a', 'none'), 'running', 'a job runs');
select is(pg_temp.refusal(format('select queue.retry_later(%s, %s, needs => array[%s])', j.id, j.claim, j.id)), format('QJ005 path: %s -> %s', j.id, j.id), 'it can''t need itself')
from queue.jobs j where j.task = 'a';
select is(pg_temp.refusal(format('select queue.retry_later(%s, %s, needs => array[%s])', j.id, j.claim, pg_temp.id('c'))),
          format('QJ005 path: %s -> %s -> %s -> %s', j.id, pg_temp.id('c'), pg_temp.id('b'), j.id), 'nor one that, at last, needs it: the path is told')
from queue.jobs j where j.task = 'a';
select is(pg_temp.refusal(format('select queue.retry_later(%s, %s, needs => array[123456])', j.id, j.claim)), 'QJ001 id: 123456', 'nor one that is not there')
from queue.jobs j where j.task = 'a';
select is(pg_temp.refusal(format('select queue.retry_later(%s, %s, needs => array[null]::bigint[])', j.id, j.claim)), '22023', 'nor NULL')
from queue.jobs j where j.task = 'a';
select is(pg_temp.states(), 'a:running b:waiting c:waiting', 'it runs on');
select is(pg_temp.finish('a', 'retry_later', jsonb_build_object('needs', pg_temp.ids('c'))), 'QJ005', 'finish_many reports it in its row');
select is(pg_temp.finish('a'), 'succeeded', 'and it can succeed');
call pg_temp.clear();
-- two at once, neither of which sees a cycle: the second fails, and its lock and dependents continue
select pg_temp.defer('a', more => '{"max_progress": null}') \g /dev/null
select queue.defer('b', lock => 'l'), queue.defer('next', lock => 'l') \g /dev/null
select pg_temp.defer('d', 'b', failure => 'proceed') \g /dev/null
select is(pg_temp.run('a', 'none') || pg_temp.run('b', 'none'), 'runningrunning', 'two jobs run');
insert into queue.pending_settlement (job_id, kind, flags, payload)
  select j.id, 'recheck', 4096, null from queue.jobs j where j.task = 'a';
do $$
declare
  v record;
begin
  -- what the races in admit/cycles.two_yields.spec come to: both have passed _check_yield
  for v in select j.id, j.claim, o.id as other from queue.jobs j join queue.jobs o on o.task in ('a', 'b') and o.id <> j.id where j.task in ('a', 'b') order by j.id loop
    delete from queue.active_job l where l.id = v.id;
    insert into queue.job_override (id, attempts, claims, progress) values (v.id, 1, 1, 1);
    insert into queue.pending_settlement (job_id, kind, flags, payload)
    select j.id, 'again', j.flags | 2048, jsonb_build_object('needs', jsonb_build_array(v.other)) from queue.job j where j.id = v.id;
  end loop;
end $$;
select is(pg_temp.states(), 'a:upstream_failed b:failed next:ready d:ready', 'one of them fails');
select is((select j.reason || ': ' || j.error from queue.jobs j where j.task = 'b'), 'dependency_cycle: the needs of two jobs form a cycle', 'and says why');
select is_empty('select * from queue.check()', 'in good order');
call pg_temp.clear();

-- A yield in a handler's own transaction is settled later, by the next fetch; until then it looks the same
select queue.defer('held', options => '{"held": true}') as held, queue.defer('later', scheduled_at => '2100-01-01') as later \gset
select queue.defer('j') as j \gset
select claim from queue.fetch(:worker) \gset
select is(queue.retry_later(:j, :claim, needs => array[:later::bigint]), 'waiting', 'a yield by a call of its own');
select is((select j.state from queue.jobs j where j.id = :j), 'waiting', 'the view shows it at once');
select is((select s.waiting from queue.stats() s where s.task = 'j'), 1::bigint, 'the figures too');
select queue.defer('k') as k \gset
select claim from queue.fetch(:worker) \gset
select is(queue.retry_later(:k, :claim, needs => array[:held::bigint]), 'upstream_failed', 'with a need that is held');
select is((select j.state from queue.jobs j where j.id = :k), 'upstream_failed', 'it shows that');
call pg_temp.clear();

select * from finish();
