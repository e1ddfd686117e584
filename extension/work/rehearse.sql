-- Rehearsing: a test sees its jobs admitted, run and retried in its own transaction, which is rolled back.

-- Admits the jobs that the caller's transaction has deferred, and settles the claims that it has ended, as
-- admission would after its COMMIT. From now on its COMMIT is refused, because the next admission would do
-- all of this a second time.
-- Locks: the admission lock, waited for and held until ROLLBACK, even while the client is waited for. So it
-- is meant for databases of tests, and only the owner may call it. Then those of _apply_replacement.
-- Why no wake-up is lost: other sessions see nothing of this transaction.
-- Raises: QJ008.
create or replace function queue.rehearse()
returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_own xid8 := pg_current_xact_id();
  v_upto bigint;
  v_ids bigint[];
  v_sent record;
  v_replaced record;
  v_timeout constant text := current_setting('lock_timeout');
begin
  {{installed}}
  perform queue._check_isolation();
  perform queue._lock_admission(true);
  select max(r.upto) into v_upto from queue.rehearsal r;
  if v_upto is null then
    insert into queue.rehearsal (n, upto) values (1, 0), (1, 0);
  end if;
  perform queue._settle_own(array(
    select h.job_id from queue.pending_settlement h where h.xid = v_own and h.kind in ('ended', 'again')));
  -- Within one transaction, ids rise.
  select array_agg(j.id order by j.id) into v_ids
  from queue.job j where j.xid = v_own and j.id > coalesce(v_upto, 0);
  if v_ids is not null then
    perform queue._admit_gated(v_ids);
    update queue.rehearsal r set upto = v_ids[cardinality(v_ids)];
  end if;
  for v_replaced in
    with gone as (
      delete from queue.pending_settlement h where h.xid = v_own and h.kind = 'replace'
      returning h.job_id, h.payload)
    select g.job_id, g.payload
    from gone g join queue.queueing_lock k on k.key = g.payload ->> 'key' and k.job_id = g.job_id
      and k.replacing = (g.payload ->> 'seq')::bigint  -- only the last replacement counts
  loop
    perform queue._apply_replacement(v_replaced.job_id, v_replaced.payload);
  end loop;
  with gone as (
    delete from queue.pending_settlement h where h.xid = v_own and h.kind in ('signal', 'event', 'group')
    returning h.job_id, h.kind)
  select array_agg(distinct g.job_id) filter (where g.kind = 'signal') as signals,
    array_agg(distinct -g.job_id) filter (where g.kind = 'event') as events,
    array_agg(distinct -g.job_id) filter (where g.kind = 'group') as groups
  into v_sent from gone g;
  perform queue._advance(p_arrived => queue._take_signals(v_sent.signals, v_sent.events));
  perform queue._advance_own();
  perform queue._settle_groups(v_sent.groups);
  -- The test may be stopped in a debugger.
  perform set_config('idle_in_transaction_session_timeout', '0', true),
    set_config('lock_timeout', v_timeout, true);
  return coalesce(cardinality(v_ids), 0);
end $$;
comment on function queue.rehearse() is
  'For tests: admits the jobs that the caller''s own transaction has deferred, so that they can be fetched'
    ' and finished there as if they were committed. Returns their number. Call it again after deferring more,'
    ' after signal and publish, and after succeed, fail, retry_later, release, sleep and wait. The'
    ' transaction can''t be committed afterwards. Until it ends, no other session can fetch, so only the'
    ' owner of the queue may call this function.';
