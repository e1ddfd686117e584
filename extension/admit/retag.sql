-- Tags for jobs that were ready before the first job with a share came, or before a weight was changed.
-- Tests: admit/shares.sql, admit/shares.retag.spec.

-- Gives tags to at most p_slice jobs of one lane: to jobs that are ready or wait for a slot, if they have no
-- tag or one from before a change of weights. It begins with lanes that have ready jobs, because others may
-- be empty, and looks for one among a hundred. Returns false if no lane has such jobs.
-- Locks: the caller holds the admission lock; rows of queue.active_job by skip locked: the session that holds
-- a row claims the job.
-- Why no wake-up is lost: if that claim is rolled back, the job stays ready, behind jobs with a tag. If the
-- order of a key's waiting jobs has changed, the key is handed over to the next admission.
create or replace function queue._retag(p_slice integer)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_lane record;
  v_old record;
  v_tags timestamptz[];
begin
  select l.lane, l.retag_from into v_lane
  from (
    select l.lane, l.retag_from, l.is_idle from queue.lane l where l.retag_from is not null
    order by l.is_idle, l.lane limit 100) l
  order by not exists (
    select from queue.active_job aj
    where aj.lane = l.lane and aj.deadline >= l.retag_from and aj.claim is null), l.is_idle, l.lane limit 1;
  if not found then
    return false;
  end if;
  select array_agg(x.id) as ids, array_agg(x.deadline) as places, array_agg(x.lane) as lanes into v_old
  from (
    select aj.id, aj.lane, aj.deadline from queue.active_job aj
    where aj.lane = v_lane.lane and aj.deadline >= v_lane.retag_from and aj.claim is null
    order by aj.deadline, aj.id limit p_slice for update skip locked) x;
  if v_old.ids is not null then
    v_tags := queue._tags(v_old.ids, v_old.lanes, v_old.places);
    update queue.active_job aj set deadline = u.tag from unnest(v_old.ids, v_tags) u (id, tag)
    where aj.id = u.id;
    perform queue._lower_marks(v_old.lanes, v_tags, v_old.ids);
    return true;
  end if;
  select array_agg(x.id) as ids, array_agg(x.deadline) as places, array_agg(x.lane) as lanes,
    array_agg(x.key) as keys
  into v_old
  from (
    select w.id, w.lane, w.deadline, w.key
    from (select distinct s.key from queue.semaphore s where v_lane.lane = any (s.lanes)) s
    cross join lateral (
      select w.id, w.lane, w.deadline, w.key from queue.waiting w
      where w.reason = 'slot' and w.key = s.key and w.lane = v_lane.lane
        and w.deadline >= v_lane.retag_from
      order by w.deadline, w.id limit p_slice) w
    limit p_slice) x;
  if v_old.ids is not null then
    v_tags := queue._tags(v_old.ids, v_old.lanes, v_old.places, v_old.keys);
    -- || '' keeps the planner from an index whose condition is on reason.
    update queue.waiting w set deadline = u.tag from unnest(v_old.ids, v_tags) u (id, tag)
    where w.id = u.id and w.reason || '' = 'slot';
    perform queue._add_slots(v_old.keys, v_old.lanes, null, null, null, v_old.ids, v_tags);
    -- A lighter job may be the first now, and fit.
    insert into queue.pending_settlement (job_id, kind, flags, payload)
    values (0, 'refill', 0, to_jsonb(array(select distinct k from unnest(v_old.keys) k)));
    return true;
  end if;
  update queue.lane l set retag_from = null where l.lane = v_lane.lane;
  return true;
end $$;

-- The invariants of tags, for queue.check().
create or replace function queue._check_tags()
returns table (problem text, id bigint, detail text)
language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select 'only some lanes of a queue and priority have tags'::text, null::bigint,
      format('%s, priority %s', l.queue, l.priority)
    from queue.lane l where l.kind < {{lane_crashed}}
    group by l.queue, l.priority having count(distinct l.tag_base) + bool_or(l.tag_base is null)::integer > 1;
  return query
    select 'a job with a share in a lane without tags'::text, aj.id, j.options ->> 'share'
    from queue.active_job aj
    join queue.lane l on l.lane = aj.lane and l.tag_base is null and l.kind < {{lane_crashed}}
    join queue.job j on j.id = aj.id
    where aj.claim is null and j.options ? 'share';
  return query
    select 'a tag in a lane without tags'::text, aj.id, format('lane %s', aj.lane)
    from queue.active_job aj join queue.lane l on l.lane = aj.lane
    where aj.claim is null and l.tag_base is null and aj.deadline < '{{end_of_tags}}';
  return query
    select 'a share with two tags'::text, null::bigint,
      format('%s, priority %s, key %s, share %s', t.queue, t.priority, t.key, t.share)
    from queue.share_tag t group by t.queue, t.priority, t.key, t.share having count(*) > 1;
end $$;
