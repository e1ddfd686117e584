-- Groups: counting their jobs, and deferring their callbacks.
--
-- Everything here runs under the admission lock. A job joins its group when it is admitted. The flag needed,
-- which defer sets for it, hands its end over to admission, as that of a job that others need. A job is
-- looked at when it ends, is retried, or is marked as done. Its row of queue.group_member is then compared
-- with queue.finished, so it does not matter how often, or why, this happens.
--
-- A settlement of kind group (job_id: the group's number, negative) makes an admission decide what follows:
-- close_group appends one, and so does the count of the last unfinished job or the first failed one.
-- Why no callback is lost, or comes too early: that settlement is read like the log. So an admission that
-- reads it has read all jobs that were committed before it, or has left some in the backlog; then it appends
-- the settlement again. When a group was closed, admission first looks which transactions may still add jobs
-- (see defer/group_option.sql). It appends one settlement for each, which is read when that transaction has
-- ended, and one for itself. Once none of them is left, no other job can join.
-- Why a callback is deferred once: its job's id is stored in the group's state, by the same transaction.
-- Two sessions: admit/groups.*.spec.

-- Lets new jobs join their groups. A job whose group is gone joins none.
-- Locks: the caller holds the admission lock.
create or replace function queue._join_groups(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_group record;
begin
  for v_group in
    with joined as (
      insert into queue.group_member (job_id, group_no)
      select u.id, g.no
      from unnest(p_ids) u (id)
      cross join lateral (
        select j.options ->> 'group' as name from queue.job j
        where j.id = u.id and j.options ? 'group' offset 0) j
      cross join lateral (select g.no from queue.job_group g where g.name = j.name offset 0) g
      on conflict on constraint group_member_pkey do nothing
      returning group_no)
    select j.group_no as no, count(*)::integer as jobs from joined j group by 1
  loop
    perform queue._add_to_group(v_group.no, v_group.jobs, 0, 0, 0);
  end loop;
end $$;

-- Counts jobs as they are now: some have ended, others run again.
-- Locks: the caller holds the admission lock.
create or replace function queue._count_in_groups(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_group record;
begin
  if not exists (select from queue.job_group) then
    return;
  end if;
  for v_group in
    with changed as materialized (
      select m.ctid as tid, m.group_no, m.state as old, f.state
      from (select distinct u.id from unnest(p_ids) u (id)) u
      cross join lateral (
        select m.ctid, m.group_no, m.state from queue.group_member m where m.job_id = u.id offset 0) m
      left join lateral (select f.state from queue.finished f where f.id = u.id offset 0) f on true
      where m.state is distinct from f.state),
    counted as (
      update queue.group_member m set state = (select f.state from queue.finished f where f.id = m.job_id)
      where m.ctid = any (array(select c.tid from changed c)))
    select c.group_no as no,
      count(*) filter (where c.state = 'succeeded')
        - count(*) filter (where c.old = 'succeeded') as succeeded,
      count(*) filter (where c.state = 'failed') - count(*) filter (where c.old = 'failed') as failed,
      count(*) filter (where c.state = 'cancelled') - count(*) filter (where c.old = 'cancelled') as cancelled
    from changed c group by 1
  loop
    perform queue._add_to_group(v_group.no, 0, v_group.succeeded::integer, v_group.failed::integer,
      v_group.cancelled::integer);
  end loop;
end $$;

-- Adds to a group's counts. If a callback may be due, the next admission looks.
-- Locks: the caller holds the admission lock. Why no wake-up is lost: see the top.
create or replace function queue._add_to_group(p_no bigint, p_jobs integer, p_succeeded integer,
  p_failed integer, p_cancelled integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_state record;
begin
  update queue.group_state s
  set tick = s.tick + 1, jobs = s.jobs + p_jobs, succeeded = s.succeeded + p_succeeded,
    failed = s.failed + p_failed, cancelled = s.cancelled + p_cancelled
  where s.group_no = p_no
    and s.tick = (select n.tick from queue.group_state n where n.group_no = p_no order by n.tick desc limit 1)
  returning s.standing, s.jobs - s.succeeded - s.failed - s.cancelled as unfinished,
    s.failed + s.cancelled > 0 and s.on_failure_id is null and s.error is null as may_fail into v_state;
  if v_state.standing = 'closed' and v_state.unfinished = 0 or v_state.standing = 'ended'
    or v_state.may_fail and exists (select from queue.job_group g
      where g.no = p_no and g.callbacks -> 'on_failure' <> 'null')
  then
    insert into queue.pending_settlement (job_id, kind, flags) values (-p_no, 'group', 0);
    perform queue._announce();
  end if;
end $$;

-- Decides what follows in these groups: closes them, ends them, and defers their callbacks. It does so for
-- all groups in one statement, because thousands may be closed at once, or wait for one backlog.
-- Locks: the caller holds the admission lock; it waits for nobody. Why no wake-up is lost: see the top.
create or replace function queue._settle_groups(p_nos bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_is_read constant boolean := not (exists (select from queue.backlog)
    or exists (select from queue.backlog_part)
    or exists (select from queue.waiting w where w.reason = 'parked'));
begin
  if p_nos is null then
    return;
  end if;
  with seen as materialized (
    select g.no, s.tick, s.standing as old,
      case when s.standing = 'open' and exists (select from queue.group_close c where c.group_no = g.no)
          then 'closing'
        when s.standing in ('closed', 'ended') or s.standing = 'closing' and v_is_read
          and -g.no not in (select h.job_id from queue.unsettled h where h.kind = 'group')
          then case when s.jobs = s.succeeded + s.failed + s.cancelled then 'ended' else 'closed' end
        else s.standing end as standing
    from unnest(p_nos) u (no)
    cross join lateral (select g.no from queue.job_group g where g.no = u.no offset 0) g
    cross join lateral (
      select s.* from queue.group_state s where s.group_no = g.no order by s.tick desc limit 1) s),
  -- Transactions that have ended are left out: the cursor may have passed them, and no admission would read
  -- the settlement.
  adding as materialized (select a.xid from queue._adding_transactions() a
    where not pg_visible_in_snapshot(a.xid, pg_current_snapshot())),
  again as (
    insert into queue.pending_settlement (xid, job_id, kind, flags)
    select a.xid, -x.no, 'group', 0 from seen x cross join adding a
    where x.old = 'open' and x.standing = 'closing'
    union all
    select pg_current_xact_id(), -x.no, 'group', 0 from seen x
    where x.standing = 'closing' and (x.old = 'open' or not v_is_read))
  update queue.group_state s
  set tick = s.tick + 1, standing = x.standing,
    ended_at = case when x.standing = 'ended' then coalesce(s.ended_at, clock_timestamp()) end
  from seen x
  where s.group_no = x.no and s.tick = x.tick and x.standing <> x.old;
  perform queue._defer_callbacks(p_nos);
end $$;

-- Other transactions that may have added jobs to groups and have not released their locks. Some may have
-- ended, because a commit makes its jobs visible before it releases the locks. pg_locks has the low 32 bits
-- of their numbers, and those of their savepoints, which are greater.
create or replace function queue._adding_transactions()
returns table (xid xid8) language plpgsql volatile parallel unsafe security invoker rows 5 as $$
declare
  v_own constant xid8 := pg_current_xact_id();
begin
  return query
    select min(v_own::text::bigint + age(v_own::xid) - age(t.transactionid))::text::xid8
    from pg_locks l
    join pg_locks t on t.virtualtransaction = l.virtualtransaction and t.locktype = 'transactionid'
      and t.mode = 'ExclusiveLock' and t.granted
    where l.locktype = 'relation' and l.relation = 'queue.job_group'::regclass and l.mode = 'RowShareLock'
      and l.database = (select d.oid from pg_database d where d.datname = current_database())
      and l.pid is distinct from pg_backend_pid()
    group by l.virtualtransaction;
end $$;

-- Defers the callbacks of groups that are due and have not been deferred. One call handles 200 groups, so
-- that nobody waits long for the admission lock; the next admission goes on with the others.
-- Locks: the caller holds the admission lock. An error is recorded, and keeps nothing from going on.
create or replace function queue._defer_callbacks(p_nos bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_due record;
  v_id bigint;
  v_error text;  -- of this call, for this group
  v_no bigint;
  v_groups integer := 0;
  v_rest bigint[];
begin
  for v_due in
    select s.group_no as no, s.tick, c.key, c.value
    from unnest(p_nos) u (no)
    cross join lateral (
      select s.* from queue.group_state s where s.group_no = u.no order by s.tick desc limit 1) s
    cross join lateral (select g.callbacks from queue.job_group g where g.no = s.group_no offset 0) g
    cross join lateral (values
      ('on_end', s.on_end_id, s.standing = 'ended'),
      ('on_success', s.on_success_id, s.standing = 'ended' and s.succeeded = s.jobs),
      ('on_failure', s.on_failure_id, s.failed + s.cancelled > 0)) x (key, id, is_due)
    cross join lateral jsonb_each(g.callbacks) c
    where c.key = x.key and c.value <> 'null' and x.is_due and x.id is null
    order by s.group_no, c.key
  loop
    if v_due.no is distinct from v_no then
      v_no := v_due.no;
      v_groups := v_groups + 1;
      v_error := null;
    end if;
    if v_groups > 200 then
      v_rest := v_rest || v_due.no;
      continue;
    end if;
    v_id := null;
    begin
      v_id := queue._defer_callback(v_due.value);
    exception when others then
      v_error := concat_ws('; ', v_error, format('%s: %s (%s)', v_due.key, left(sqlerrm, 1000), sqlstate));
      raise warning 'pgdefer: a group''s callback can''t be deferred: %', v_error;
    end;
    update queue.group_state s
    set on_end_id = case v_due.key when 'on_end' then v_id else s.on_end_id end,
      on_success_id = case v_due.key when 'on_success' then v_id else s.on_success_id end,
      on_failure_id = case v_due.key when 'on_failure' then v_id else s.on_failure_id end, error = v_error
    where s.group_no = v_due.no and s.tick = v_due.tick;
  end loop;
  insert into queue.pending_settlement (job_id, kind, flags)
  select distinct -u.no, 'group', 0 from unnest(v_rest) u (no);
  if v_groups > 0 then
    perform queue._announce();
  end if;
end $$;

-- Removes groups that ended long ago and have no jobs any more.
-- Locks: the caller holds the admission lock. Why no wake-up is lost: all callbacks have been deferred, or
-- can't be due any more.
create or replace function queue._prune_groups(p_max integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_nos bigint[];
begin
  v_nos := array(
    select s.group_no from queue.group_state s
    where s.ended_at < clock_timestamp() - interval '7 days'
      and not exists (select from queue.group_member m where m.group_no = s.group_no)
    order by s.ended_at limit p_max);
  delete from queue.group_state s where s.group_no = any (v_nos);
  delete from queue.group_close c where c.group_no = any (v_nos);
  delete from queue.job_group g where g.no = any (v_nos);
end $$;

-- Invariants of groups, for queue.check().
create or replace function queue._check_groups()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select 'a group without one state'::text, null::bigint, g.name::text
    from queue.job_group g
    where (select count(*) from queue.group_state s where s.group_no = g.no) <> 1;
  return query
    select 'a job of a group counted in another state'::text, m.job_id, format('%s: %s', m.group_no, m.state)
    from queue.group_member m left join queue.finished f on f.id = m.job_id
    where m.state is distinct from f.state
      and not exists (select from queue.pending_settlement h where h.job_id = m.job_id);
  return query
    select 'a job of a group whose end is not handed over'::text, m.job_id, m.group_no::text
    from queue.group_member m join queue.active_job aj on aj.id = m.job_id
    where aj.flags & {{needed}} = 0;
  return query
    select 'a group that counts other jobs'::text, null::bigint, format('%s: %s', s.group_no, m.unfinished)
    from queue.group_state s
    left join (
      select m.group_no, count(*) filter (where m.state is null) as unfinished,
        count(*) filter (where m.state = 'succeeded') as succeeded,
        count(*) filter (where m.state = 'failed') as failed,
        count(*) filter (where m.state = 'cancelled') as cancelled
      from queue.group_member m group by 1) m on m.group_no = s.group_no
    where s.jobs - s.succeeded - s.failed - s.cancelled <> coalesce(m.unfinished, 0)
      or s.succeeded < m.succeeded or s.failed < m.failed or s.cancelled < m.cancelled;
  return query
    select 'a group that nobody will end'::text, null::bigint, s.group_no::text
    from queue.group_state s
    where (s.standing = 'open' and exists (select from queue.group_close c where c.group_no = s.group_no)
        or s.standing = 'closing'
        or s.standing = 'closed' and s.jobs = s.succeeded + s.failed + s.cancelled
        or s.standing = 'ended' and s.jobs <> s.succeeded + s.failed + s.cancelled)
      and not exists (select from queue.pending_settlement h
        where h.kind = 'group' and h.job_id = -s.group_no);
end $$;
