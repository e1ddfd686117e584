-- The backlog: parts of the log that are too large for one slice, read by priority.

-- Scans the backlog for priorities, part by part, for at most 50 ms, so that the most urgent jobs can be read
-- first, wherever they are. The first 20 parts are scanned however long that takes: on a busy machine 50 ms
-- may pass without any work. If a part has more than 8 priorities, neighbouring ones form a band, which is
-- read as one.
-- Locks: the caller holds the admission lock.
create or replace function queue._scan_backlog(p_slice integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_until constant timestamptz := clock_timestamp() + interval '50 ms';
  v_rounds integer := 0;
  v_range record;
  v_seen record;
  v_bands record;
begin
  loop
    select b.* into v_range from queue.backlog b order by b.no limit 1;
    exit when not found;
    select count(*) as n, max(s.priority) as high, min(s.priority) as low,
      (array_agg(s.xid))[count(*)] as to_xid, array_agg(s.id) as ids,
      case when bool_and(s.is_plain) and min(s.priority) = max(s.priority) and min(s.queue) = max(s.queue)
        then min(s.queue) end as queue
    into v_seen
    from (
      select j.xid, j.id, j.priority, j.queue, {{is_plain}} as is_plain
      from queue.job j
      where (j.xid, j.id) > (v_range.from_xid, v_range.from_id) and j.xid <= v_range.to_xid
        and pg_visible_in_snapshot(j.xid, v_range.upto) and j.xid is distinct from v_range.own
      order by j.xid, j.id limit p_slice) s;
    if v_seen.n > 0 then
      if v_seen.low = v_seen.high then
        select array[v_seen.high] as tops, array[v_seen.low] as bottoms into v_bands;
      else
        select array_agg(b.top order by b.top desc) as tops,
          array_agg(b.bottom order by b.top desc) as bottoms into v_bands
        from (
          select max(r.priority) as top, min(r.priority) as bottom
          from (
            select p.priority, row_number() over (order by p.priority desc) - 1 as n,
              count(*) over () as total
            from (
              select distinct coalesce((l.job_options).priority, 0) as priority from queue.log l
              where (l.xid, l.id) > (v_range.from_xid, v_range.from_id)
                and (l.xid, l.id) <= (v_seen.to_xid, v_seen.ids[v_seen.n])
                and pg_visible_in_snapshot(l.xid, v_range.upto) and l.xid is distinct from v_range.own) p) r
          group by r.n * 8 / greatest(r.total, 8)) b;
      end if;
      insert into queue.backlog_part (no, priority, is_first, is_mixed, from_xid, from_id, to_xid, to_id,
        upto, own, queue, tops, bottoms)
      values (nextval('queue.tick_seq'), v_bands.tops[1], v_range.is_first, v_seen.low < v_seen.high,
        v_range.from_xid, v_range.from_id, v_seen.to_xid, v_seen.ids[v_seen.n], v_range.upto, v_range.own,
        case when v_seen.ids = array(select u.id from unnest(v_seen.ids) u (id) order by u.id)
          then v_seen.queue end, v_bands.tops, v_bands.bottoms);
    end if;
    if v_seen.n < p_slice then
      delete from queue.backlog b where b.no = v_range.no;
    else
      update queue.backlog b set from_xid = v_seen.to_xid, from_id = v_seen.ids[v_seen.n]
      where b.no = v_range.no;
    end if;
    v_rounds := v_rounds + 1;
    exit when v_rounds >= 20 and clock_timestamp() > v_until;
  end loop;
end $$;

-- Removes the most urgent band from the backlog, the oldest of equally urgent ones, and returns it: rows of
-- the log after (from_xid, from_id), up to (to_xid, to_id), with priorities from bottom to top. upto NULL:
-- there is none. must_park: older jobs of a lock may be left behind or parked, so jobs with an ordered lock
-- must be parked, too (_admit_range).
-- Locks: the caller holds the admission lock.
create or replace function queue._next_backlog_part(
  out from_xid xid8, out from_id bigint, out to_xid xid8, out to_id bigint, out upto pg_snapshot,
  out own xid8,
  out top integer, out bottom integer, out must_park boolean)
language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_no bigint;
  v_is_last boolean;
begin
  select p.no, p.from_xid, p.from_id, p.to_xid, p.to_id, p.upto, p.own, p.tops[1], p.bottoms[1],
    cardinality(p.tops) = 1,
    not p.is_first or p.is_mixed or exists (select from queue.backlog_part o where o.no < p.no)
      or exists (select from queue.waiting w where w.reason = 'parked')
  into v_no, from_xid, from_id, to_xid, to_id, upto, own, top, bottom, v_is_last, must_park
  from queue.backlog_part p order by p.priority desc, p.no limit 1;
  if v_is_last then
    delete from queue.backlog_part p where p.no = v_no;
  else
    update queue.backlog_part p set priority = p.tops[2], tops = p.tops[2:], bottoms = p.bottoms[2:]
    where p.no = v_no;
  end if;
end $$;

-- Whether the backlog may stay in the log for now: all of it is scanned, and of the kind that _claim_slice
-- claims; nothing waits for its end; and only one worker is alive. With several workers, it is better if many
-- jobs are ready, because the workers then do not wait for each other.
create or replace function queue._may_backlog_wait()
returns boolean language plpgsql stable parallel safe security invoker as $$
begin
  return not exists (select from queue.backlog)
    and not exists (select from queue.backlog_part p where p.queue is null)
    and not exists (select from queue.waiting w where w.reason = 'parked')
    and not exists (select from queue.share_tag)
    and (select count(*) = 1 from (select from queue.worker w where w.gone_at is null limit 2) w);
end $$;
