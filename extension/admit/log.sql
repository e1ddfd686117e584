-- Reading new rows of the log. admit/cursor.sql records how far it has been read.
-- Tests: admit/admission.sql, admit/admission.two.spec.

-- Admits at most p_slice jobs of a range of the log, with priorities from p_bottom to p_top if given. The
-- rest goes to queue.backlog (is_cut). Plain jobs go to queue.active_job here; the others go through the
-- gates, and so do jobs that may be needed, as their ids are at most p_high_need_id. The backlog may contain
-- older jobs of an ordered lock. So with p_park, jobs with an ordered lock are parked until all backlog has
-- been read, and are then admitted in the order of ids.
-- Locks: the caller holds the admission lock.
create or replace function queue._admit_range(
  p_from_xid xid8, p_from_id bigint, p_to_xid xid8, p_to_id bigint, p_upto pg_snapshot, p_own xid8,
  p_slice integer,
  p_high_id bigint, p_high_need_id bigint, p_has_task_pause boolean, p_park boolean,
  p_top integer default null, p_bottom integer default null,
  out n integer, out high_id bigint, out is_cut boolean, out gated bigint[], out parked bigint[])
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_low bigint[];
begin
  with fresh as materialized (
    select j.id, j.flags, coalesce(j.deadline, 'infinity') as deadline, l.lane, l.extra_flags,
      (coalesce(j.deadline, 'infinity'), j.id) < (l.low_deadline, l.low_id) or l.is_idle as is_low,
      j.flags & ({{gated}} | {{needed}}) = 0 and j.id > p_high_need_id and l.lane is not null
        and not p_has_task_pause and l.tag_base is null and (j.options ? 'share') is not true as is_plain
    from (select j.id, j.flags, j.deadline, j.queue, j.priority, j.options from queue.job j
          where (j.xid, j.id) > (p_from_xid, p_from_id) and (j.xid, j.id) <= (p_to_xid, p_to_id)
            and (p_top is null or j.priority between p_bottom and p_top)
            and pg_visible_in_snapshot(j.xid, p_upto) and j.xid is distinct from p_own
          order by j.xid, j.id limit p_slice) j
    left join lateral (select l.lane, l.low_deadline, l.low_id, l.is_idle, l.extra_flags, l.tag_base
                       from queue.lane l
                       where l.queue = j.queue and l.priority = j.priority
                         and l.kind = {{lane_plain}} limit 1) l on true),
  plain as (
    insert into queue.active_job (id, deadline, lane, attempt, flags)
    select x.id, x.deadline, x.lane, 0, x.flags | x.extra_flags from fresh x where x.is_plain)
  select count(*), greatest(p_high_id, max(x.id)),
    array_agg(x.id) filter (where not x.is_plain and not (p_park and x.flags & {{ordered}} <> 0)),
    array_agg(x.id) filter (where p_park and x.flags & {{ordered}} <> 0),
    array_agg(x.id) filter (where x.is_plain and x.is_low)
  into n, high_id, gated, parked, v_low
  from fresh x;
  is_cut := coalesce(n >= p_slice, false);
  if is_cut then
    insert into queue.backlog (no, from_xid, from_id, to_xid, upto, own, is_first)
    select nextval('queue.tick_seq'), x.xid, x.id, p_to_xid, p_upto, p_own, not p_park
    from (select j.xid, j.id from queue.job j
          where (j.xid, j.id) > (p_from_xid, p_from_id) and (j.xid, j.id) <= (p_to_xid, p_to_id)
            and pg_visible_in_snapshot(j.xid, p_upto) and j.xid is distinct from p_own
          order by j.xid, j.id offset p_slice - 1 limit 1) x;
  end if;
  if v_low is not null then
    perform queue._lower_marks(array_agg(aj.lane), array_agg(aj.deadline), array_agg(aj.id))
      from queue.active_job aj where aj.id = any (v_low);
  end if;
end $$;
