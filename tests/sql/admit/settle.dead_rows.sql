-- Settlements that admission has deleted, and that an open transaction keeps as dead rows: no call reads them.

select plan(2);

-- The calls that read more than a few of them, or of their entries in the index.
create function pg_temp.entries() returns bigint language sql as $$
  select sum(pg_stat_get_xact_tuples_returned(i.indexrelid))::bigint + pg_stat_get_xact_numscans('queue.pending_settlement'::regclass) * 1000
  from pg_index i where i.indrelid = 'queue.pending_settlement'::regclass
$$;
create function pg_temp.reads(calls text[]) returns text[] language plpgsql as $$
declare
  v_call text;
  v_before bigint;
  v_reads text[] := '{}';
begin
  foreach v_call in array calls loop
    -- then random() returns no small number for a while
    perform setseed(0.1), set_config('pgdefer.maintained_at', '', false);
    v_before := pg_temp.entries();
    execute v_call;
    v_reads := v_reads || case when pg_temp.entries() - v_before > 100 then array[v_call] end;
  end loop;
  return v_reads;
end $$;

-- A fetch that finds only new jobs.
create function pg_temp.fetch(worker bigint, n integer) returns void language plpgsql as $$
begin
  perform queue.succeed(f.id, f.claim) from queue.fetch(worker, '{plain}', 1000) f;
  perform set_config('pgdefer.was_dry', 'on', false), set_config('pgdefer.looked_at', '', false);
  perform queue.defer('t', queue => 'plain') from generate_series(1, n);
  perform queue.fetch(worker, '{plain}', n);
end $$;

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
begin;
select pg_current_xact_id() as old \gset
prepare transaction 'settle.dead_rows';
insert into queue.pending_settlement (job_id, kind, flags) select n, 'ended', 0 from generate_series(1, 1000) n;
delete from queue.pending_settlement;
select queue.defer('t', lock => 'l') as id \gset
select queue.tick() \g /dev/null
select is(pg_temp.reads(array[
  format('select queue.before_sleep(%s)', :worker),
  format('select queue.heartbeat(%s)', :worker),
  'select queue.tick()',
  format('select queue.fetch(%s, ''{plain}'')', :worker),
  format('select pg_temp.fetch(%s, 1) as newcomer', :worker),
  format('select pg_temp.fetch(%s, 100) as slice', :worker),
  format('select queue.set_priority(array[%s], 1)', :id),
  format('select queue.hold(%s)', :id), format('select queue.unhold(%s)', :id),
  format('select queue.cancel(%s)', :id), format('select queue.retry(array[%s])', :id),
  format('select queue.fail_jobs(array[%s], ''x'')', :id),
  format('select queue.delete(array[%s])', :id)]), '{}', 'no call reads the dead rows');

-- What is left is found: of a transaction in flight, of this one, of one after the cursor, and what was shelved
begin;
insert into queue.pending_settlement (xid, job_id, kind, flags) values (:'old', -1, 'group', 0), ('0', -2, 'group', 0);
insert into queue.pending_settlement (job_id, kind, flags) values (-3, 'group', 0);
select queue._move_cursor(k.tick, pg_current_snapshot(), pg_current_xact_id(), k.high_id, false, k.due_at) from queue.cursor_now k \g /dev/null
insert into queue.pending_settlement (xid, job_id, kind, flags) select k.next_xid, -4, 'group', 0 from queue.cursor_now k;
insert into queue.pending_settlement (xid, job_id, kind, flags) values ('3', -5, 'group', 0);
select array(select h.job_id from queue.unsettled h order by 1 desc) as found \gset
rollback;
select is(:'found'::text, '{-1,-2,-3,-4}', 'all that is not settled, but not what the cursor has passed');
rollback prepared 'settle.dead_rows';

select * from finish();
