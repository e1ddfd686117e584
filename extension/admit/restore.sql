-- After a restore or a copy: stored transaction ids and numbers are no longer valid.

-- Begins a new era if one is due, and after a restore into another cluster admits again the jobs whose stored
-- transaction ids are no longer valid.
-- Locks: if a new era is due, the admission lock, waited for: the caller holds nothing. Then the row of
-- queue.installation, which only a transaction with queue.configure keeps locked. For why no number of an
-- ended era is used again see _ensure_era.
-- Raises: 55000 while the tables are being restored.
create or replace function queue._check_era()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_era text := queue._era();
begin
  if queue._is_era(v_era) then
    return;
  end if;
  perform queue._check_restored();
  perform queue._lock_admission(true);
  if queue._is_era(v_era) then
    return;  -- another session has begun it meanwhile
  end if;
  if exists (select from queue.installation i
    where i.system_identifier <> (select c.system_identifier from pg_control_system() c)) then
    perform queue._restart_cursor();
  end if;
  perform queue._begin_era(v_era);
end $$;

-- Makes sure that the era is current. A session calls it before its first claim. Once is enough, because an
-- era ends together with all sessions that could claim: with the server, with its recovery, or with the
-- tables, when they are created again. A session of a standby could not claim, so it has not called this.
-- Other cases lose nothing. A rolled-back transaction forgets the call.
-- Locks: as _check_era: the caller holds nothing.
create or replace function queue._ensure_era()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_installation text := to_regclass('queue.installation')::oid::text;
begin
  if current_setting('pgdefer.era', true) is distinct from v_installation then
    perform queue._check_era();
    perform set_config('pgdefer.era', v_installation, false);
  end if;
end $$;

-- Admits again all jobs that have not been admitted, and gives every row an xid that this cluster has seen.
-- After a restore into another cluster the stored transaction ids mean nothing, or lie in the future.
-- Locks: the caller holds the admission lock.
create or replace function queue._restart_cursor()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_snapshot pg_snapshot := pg_current_snapshot();
begin
  delete from queue.backlog;
  delete from queue.backlog_part;
  delete from queue.deleted;
  -- This includes jobs whose stored id happens to be that of a transaction in progress, or of this one.
  update queue.job j set xid = '3'
  where j.xid >= least(pg_snapshot_xmin(v_snapshot), pg_current_xact_id());
  update queue.job j set xid = pg_current_xact_id()
  where not exists (select from queue.active_job aj where aj.id = j.id)
    and not exists (select from queue.finished f where f.id = j.id)
    and not exists (select from queue.waiting w where w.id = j.id)
    and not exists (select from queue.job_now n join queue.lock_member m on m.lock = n.lock and m.id = n.id
                    where n.id = j.id)
    and not exists (select from queue.pending_settlement h where h.job_id = j.id
      and h.kind in ('ended', 'again'));
  update queue.pending_settlement h set xid = pg_current_xact_id();
  update queue.horizon h set looked_at = '-infinity', looked_xid = '0';
  perform queue._raise_needed_mark((select max(d.need_id) from queue.need d));
  insert into queue.cursor (tick, next_xid, in_flight, high_id, has_backlog, due_at)
  select k.tick + 1, pg_snapshot_xmax(v_snapshot),
    queue._in_flight(v_snapshot, pg_current_xact_id()), k.high_id,
    exists (select from queue.waiting w where w.reason = 'parked'), '-infinity'
  from queue.cursor_now k;
  delete from queue.cursor k where k.tick < (select max(m.tick) from queue.cursor m);
  update queue.installation i set system_identifier = (select c.system_identifier from pg_control_system() c)
  where i.system_identifier <> (select c.system_identifier from pg_control_system() c);
end $$;

-- If a dump's data is restored over an installed queue, which is not supported, there is a second row of
-- queue.cursor, and there are jobs that the newer row has passed. Then this admits all of them again, as
-- after any restore. It does not run each time, because it reads rows that others have replaced. (A unique
-- constraint would read these, too, with each move of the cursor.)
-- Locks: the caller holds the admission lock.
create or replace function queue._repair_cursor()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if (select count(*) from (select from queue.cursor k limit 2) k) > 1 then
    perform queue._restart_cursor();
    raise warning 'pgdefer: data was restored over an installed queue; its jobs are admitted again';
  end if;
end $$;
