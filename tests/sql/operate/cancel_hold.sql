-- cancel, hold and unhold: each on a job of each state, and what becomes of the jobs that wait for it.

select plan(21);

\ir change.helpers.psql

set pgdefer.notify = off;

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- The answer of a call for the job of each state, or its error.
create function pg_temp.each(call text) returns text language plpgsql as $$
declare
  v_id bigint;
  v_answer text;
  v_all text[];
begin
  foreach v_id in array pg_temp.ids() loop
    begin
      execute format(call, v_id) into v_answer;
    exception when others then
      v_answer := sqlstate;
    end;
    v_all := v_all || v_answer;
  end loop;
  return array_to_string(v_all, ', ');
end $$;

-- Arguments
select is(test.refusal(format('select queue.%s(%s)', name, id)), 'QJ001', format('%s(%s)', name, id)) from unnest(array['cancel', 'hold', 'unhold']) name, unnest(array['424242', 'null']) id;
begin isolation level repeatable read;
select is(test.refusal(format('select queue.%s(1)', name)), 'QJ008', name || ' in REPEATABLE READ') from unnest(array['cancel', 'hold', 'unhold']) name;
rollback;

-- Each call on each state
call pg_temp.make_zoo();
select is(pg_temp.each('select queue.cancel(%s)'), 'QJ003, cancelled, cancelled, cancelled, cancelled, cancelled, cancelled, cancelled, cancelled, cancelled, QJ003, QJ003, QJ003', 'cancel: all that have not started or ended');
select is(pg_temp.states(), 'running, ' || repeat('cancelled cancelled, ', 9) || 'succeeded, failed attempts, cancelled aborted', 'they are cancelled');
select is(pg_temp.each('select queue.cancel(%s, true)'), 'running' || repeat(', QJ003', 12), 'with abort the running one is told');
select results_eq(format('select id, reason from queue.heartbeat(%s)', :worker), $$values (pg_temp.zoo('running'), 'cancelled')$$, 'by its heartbeat');
select is_empty('select * from queue.check()', 'in order');

call pg_temp.make_zoo();
select is(pg_temp.each('select queue.unhold(%s)'), repeat('QJ003, ', 9) || 'ready, QJ003, QJ003, QJ003', 'unhold: only a held one');
call pg_temp.make_zoo();
select is(pg_temp.each('select queue.hold(%s)'), 'QJ003' || repeat(', held', 9) || ', QJ003, QJ003, QJ003', 'hold: all that have not started or ended');
select is(pg_temp.states(), 'running, ' || repeat('held, ', 9) || 'succeeded, failed attempts, cancelled aborted', 'they are held');
select is_empty('select * from queue.check()', 'in order');
select is(pg_temp.each('select queue.unhold(%s)'), 'QJ003, ready, ready, scheduled, scheduled, blocked, blocked, waiting, upstream_failed, ready, QJ003, QJ003, QJ003', 'unhold: each waits for what it waited for');
select is(pg_temp.states(), 'running, ready, ready paused, scheduled, scheduled, blocked lock, blocked limit, waiting, upstream_failed, ready, succeeded, failed attempts, cancelled aborted', 'or starts');
select is_empty('select * from queue.check()', 'in order');

select * from finish();
