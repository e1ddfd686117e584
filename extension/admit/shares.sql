-- Shares take turns by weight within a queue and priority (start-time fair queueing).
--
-- A ready job of a share has a tag, and jobs are claimed in the order of tags, then of ids. The tag is the
-- later of two: how far its share has come (queue.share_tag), and the virtual time, which is the tag of the
-- first ready job. Each job advances its share by 1 / weight. So a share with few jobs gets its turn at once,
-- and a share with many jobs waits only behind its own jobs. fetch just reads its index: the tag is stored in
-- queue.active_job.deadline, which determines the order in a lane. Tags are times before the year 1, which no
-- deadline can be; 0.1 s of them is one job of weight 1.
--
-- A queue and priority has tags from its first job with a share on, until _end_tags; its lanes then have
-- tag_base. Jobs without a share form one share, ''. Jobs that were ready before get their tags slice by
-- slice (_retag). Jobs that wait for a slot of a key have tags of this key, by the same rule. So shares also
-- take turns at slots, and a share whose jobs wait at one key does not fall behind elsewhere. Before jobs
-- wait there, slots go to the jobs of an admission in the order of the tags that they would get as they begin
-- to wait (_turns). A job that is ready does not give its slot to one that is admitted later. A job that
-- leaves its lane unclaimed keeps its tag (queue.job_override) for its return, or gives it back to its share
-- (_return_tags).
-- Everything here runs under the admission lock.

-- Returns the tags of jobs that become ready in lanes, or, with p_keys, begin to wait for a slot of a key.
-- For a lane without tags it returns the places that were passed. p_places: the order of jobs within a share,
-- before that of ids. p_moved: jobs that waited for another key; a tag that they kept does not count here. It
-- looks up the first job of each share and computes the tags of the others, so it costs as much as a sort. Of
-- the lanes of a queue and priority, only some may have jobs that still need new tags, because _retag takes
-- one lane after the other. But their shares have the same tags.
-- Locks: the caller holds the admission lock. Why no wake-up is lost: the caller makes the jobs ready.
-- In one piece: one query, whose parts pass on whole rows.
create or replace function queue._tags(p_ids bigint[], p_lanes integer[], p_places timestamptz[],
  p_keys text[] default null, p_moved boolean[] default null)
returns timestamptz[] language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_groups record;
  v_tags timestamptz[];
begin
  select array_agg(g.queue) as queues, array_agg(g.priority) as priorities, array_agg(g.key) as keys,
    array_agg(queue._virtual_time(g.queue, g.priority, g.key)) as times,
    array_agg(g.until - interval '1 microsecond') as ends
  into v_groups
  from (
    select l.queue, l.priority, coalesce(u.key, '') as key,
      min(coalesce(l.retag_from, '{{end_of_tags}}')) as until
    from unnest(p_lanes, p_keys) u (lane, key) join queue.lane l on l.lane = u.lane
    where l.tag_base is not null
    group by 1, 2, 3) g;
  if v_groups.queues is null then
    return p_places;
  end if;
  perform queue._forget_tags(g.queue, g.priority, g.key, g.at, 2 * cardinality(p_ids) + 10)
  from unnest(v_groups.queues, v_groups.priorities, v_groups.keys, v_groups.times)
    g (queue, priority, key, at);
  with jobs as materialized (
    select u.n, u.id, u.place, g.queue, g.priority, g.key, g.at, g.last as end,
      coalesce(j.share, '') as share, case when u.moved is not true then j.tag end as tag, u.lane
    from unnest(p_ids, p_lanes, p_places, p_keys, p_moved) with ordinality
      u (id, lane, place, key, moved, n)
    cross join lateral (
      select l.queue, l.priority, l.tag_base is not null as has_tags from queue.lane l
      where l.lane = u.lane offset 0) l
    left join lateral (
      select g.*
      from unnest(v_groups.queues, v_groups.priorities, v_groups.keys, v_groups.times, v_groups.ends)
        g (queue, priority, key, at, last)
      where l.has_tags and g.queue = l.queue and g.priority = l.priority
        and g.key = coalesce(u.key, '')) g on true
    cross join lateral (
      select j.options ->> 'share' as share, j.tag
      from queue.job_now j where j.id = u.id offset 0) j),
  numbered as (
    select j.*, row_number() over w as no,
      count(*) over (partition by j.queue, j.priority, j.key, j.share) as n_of_share
    from jobs j where j.queue is not null and j.tag is null
    window w as (partition by j.queue, j.priority, j.key, j.share order by j.place, j.id)),
  first as (
    select n.*, case when n.no = 1 then queue._tag_step(n.share) end as step, o.tid, o.last
    from numbered n
    left join lateral (
      select t.ctid as tid, t.tag as last from queue.share_tag t
      where n.no = 1 and t.queue = n.queue and t.priority = n.priority and t.key = n.key
        and t.share = n.share
        and hashtextextended(t.share, 0) = hashtextextended(n.share, 0)
      order by t.tick desc limit 1) o on true),
  tagged as materialized (
    select f.*, greatest(f.at, max(f.last) over s) as start, max(f.step) over s as step_of_share
    from first f window s as (partition by f.queue, f.priority, f.key, f.share)),
  advanced as materialized (
    select t.queue, t.priority, t.key, t.share, t.tid, t.next
    from (
      select t.*, least(t.start + t.n_of_share * t.step_of_share * interval '1 microsecond', t.end) as next
      from tagged t where t.no = 1) t
    where t.next is distinct from t.last),
  gone as (
    delete from queue.share_tag t
    where t.ctid = any (array(select t.tid from advanced t where t.tid is not null))),
  kept as (
    insert into queue.share_tag (queue, priority, key, share, tag, tick)
    select t.queue, t.priority, t.key, t.share, t.next, nextval('queue.tick_seq') from advanced t)
  select array_agg(x.tag order by x.n) into v_tags
  from (
    select t.n, least(t.start + (t.no - 1) * t.step_of_share * interval '1 microsecond', t.end) as tag
    from tagged t
    union all
    -- The tag is at most a hundred turns before the virtual time, so that this does not go back further. A
    -- job that was ready goes before those that wait.
    select j.n, case when p_keys is null then least(greatest(j.tag, j.at - interval '10 s'), j.last)
      else queue._front_tag(j.key, j.lane, j.tag) end
    from (
      select j.*, coalesce((
        select t.tag from queue.share_tag t
        where t.queue = j.queue and t.priority = j.priority and t.key = j.key and t.share = j.share
          and hashtextextended(t.share, 0) = hashtextextended(j.share, 0)
        order by t.tick desc limit 1), j.at) as last
      from jobs j where j.queue is not null and j.tag is not null) j
    union all
    select j.n, j.place from jobs j where j.queue is null) x;
  return v_tags;
end $$;

-- The order in which jobs get the first slots of keys, as places in p_ids. It is the order of the tags that
-- they would get if they began to wait, for each of the pairs. A job with several keys comes when it has its
-- turn at each. p_ns, p_pairs: which job has which (key, lane). In a lane without tags all jobs are one
-- share.
-- Arrays stand in place of joins, because the planner may join only by nested loops here. They are variables,
-- because in a column of arrays all elements before the one asked for would be read.
create or replace function queue._turns(p_ids bigint[], p_lanes integer[], p_deadlines timestamptz[],
  p_ns integer[], p_pairs integer[])
returns integer[] language plpgsql stable parallel safe security invoker as $$
declare
  v_shares text[];
  v_steps double precision[];
begin
  with jobs as (
    select u.n, case when l.tag_base is not null then coalesce(j.share, '') else '' end as share
    from unnest(p_ids, p_lanes) with ordinality u (id, lane, n)
    cross join lateral (select l.tag_base from queue.lane l where l.lane = u.lane offset 0) l
    cross join lateral (
      select j.options ->> 'share' as share from queue.job_now j where j.id = u.id offset 0) j),
  steps as (
    select j.n, j.share, case when row_number() over (partition by j.share) = 1
      then queue._tag_step(j.share) end as step
    from jobs j)
  select array_agg(s.share order by s.n), array_agg(s.step order by s.n) into v_shares, v_steps
  from (select s.n, s.share, max(s.step) over (partition by s.share) as step from steps s) s;
  return array(
    with pairs as (
      select k.n, k.pair from unnest(p_ns, p_pairs) k (n, pair)
      union all
      select n, null from (select generate_subscripts(p_ids, 1) except select unnest(p_ns)) k (n))
    select x.n
    from (
      select k.n, p_ids[k.n] as id, v_steps[k.n] * (row_number() over (
        partition by k.pair, v_shares[k.n] order by p_deadlines[k.n], p_ids[k.n]) - 1) as turn
      from pairs k) x
    group by x.n, x.id
    order by max(x.turn), x.id);
end $$;

-- Deletes tags of shares before the virtual time, which no longer have an effect. Each call of _tags deletes
-- up to twice as many as it can add.
-- Locks: the caller holds the admission lock. Why no wake-up is lost: no job changes.
create or replace function queue._forget_tags(p_queue text, p_priority integer, p_key text, p_at timestamptz,
  p_most integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  delete from queue.share_tag t
  where t.ctid = any (array(
    select t.ctid from queue.share_tag t
    where t.queue = p_queue and t.priority = p_priority and t.key = p_key and t.tag < p_at
    order by t.tag limit p_most));
end $$;

-- The tag of the first job that is ready in a queue and priority, or that waits for a slot of a key there. If
-- there is no such job, the greatest tag of any of its shares, so that all shares start again together. It
-- begins a day after tag_base: before that lie the tags of jobs that return to the front (_front_tag). A
-- bitmap would read all that is ready, and sort it.
create or replace function queue._virtual_time(p_queue text, p_priority integer, p_key text)
returns timestamptz language plpgsql stable parallel safe security invoker set enable_bitmapscan = off as $$
declare
  v_at timestamptz;
begin
  select greatest(max(l.tag_base) + interval '1 day', coalesce(min(f.deadline), (
      select t.tag from queue.share_tag t
      where t.queue = p_queue and t.priority = p_priority and t.key = p_key order by t.tag desc limit 1)))
  into v_at
  from queue.lane l
  left join lateral (
    select f.deadline
    from (
      (select aj.deadline from queue.active_job aj
       where p_key = '' and not l.is_idle and aj.lane = l.lane
         and (aj.deadline, aj.id) >= (l.low_deadline, l.low_id) and aj.deadline >= l.tag_base
         and aj.claim is null
       order by aj.deadline, aj.id limit 1)
      union all
      (select w.deadline from queue.waiting w
       where p_key <> '' and w.reason = 'slot' and w.key = p_key and w.lane = l.lane
         and w.deadline >= l.tag_base
       order by w.deadline, w.id limit 1)) f
    where f.deadline < coalesce(l.retag_from, '{{end_of_tags}}')) f on true
  where l.queue = p_queue and l.priority = p_priority and l.tag_base is not null;
  return v_at;
end $$;

-- How far one job advances a share, in microseconds of tags. The longest pattern that matches the share gives
-- the weight.
create or replace function queue._tag_step(p_share text)
returns double precision language plpgsql stable parallel safe security invoker as $$
declare
  v_weight double precision;
begin
  select c.weight into v_weight from queue.share_config c where c.pattern = p_share;
  if v_weight is null then
    select c.weight into v_weight from queue.share_config c
    where right(c.pattern, 1) = '*' and starts_with(p_share, left(c.pattern, -1)) and p_share <> ''
    order by length(c.pattern) desc limit 1;
  end if;
  return round(100000 / coalesce(v_weight, 1));
end $$;

-- The tag that puts a job before all jobs that wait for a slot of a key in a lane, because it was ready
-- before them. In a lane without tags it is the place that was passed.
create or replace function queue._front_tag(p_key text, p_lane integer, p_place timestamptz)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
begin
  if p_place >= '{{end_of_tags}}' then
    return p_place;
  end if;
  return (
    select greatest(l.tag_base, least(
      (select w.deadline from queue.waiting w
       where w.reason = 'slot' and w.key = p_key and w.lane = p_lane order by w.deadline, w.id limit 1)
        - interval '1 microsecond',
      queue._virtual_time(l.queue, l.priority, p_key)))
    from queue.lane l where l.lane = p_lane);
end $$;

-- Returns the place of a job with several keys that was taken out of a key's line and waits there again.
-- _tags gave it the last tag of its share. Instead it gets the tag of the first later job of its share, among
-- the first 100 in the line: with its smaller id it stands before that job.
create or replace function queue._own_place(p_id bigint, p_lane integer, p_key text, p_tag timestamptz)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
begin
  return coalesce((
    select f.deadline
    from (
      select w.id, w.deadline from queue.waiting w
      where w.reason = 'slot' and w.key = p_key and w.lane = p_lane and w.deadline < p_tag
      order by w.deadline, w.id limit 100) f
    where f.id > p_id
      and (select j.options ->> 'share' from queue.job_now j where j.id = f.id)
        is not distinct from (select j.options ->> 'share' from queue.job_now j where j.id = p_id)
    order by f.deadline limit 1), p_tag);
end $$;

-- Keeps the tag of a job that leaves its lane unclaimed, so that it keeps its place.
-- Locks: the caller holds the admission lock and the job's row of queue.active_job. Why no wake-up is lost:
-- no job becomes ready.
create or replace function queue._keep_tag(p_id bigint, p_place timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  if p_place < '{{end_of_tags}}' then
    insert into queue.job_override as s (id, tag) values (p_id, p_place)
    on conflict on constraint job_override_pkey do update set tag = excluded.tag;
  end if;
end $$;

-- Moves shares back for jobs that will not start there, because they have ended or go to another queue or
-- priority. Later jobs of the share that are ready keep their tags, because no index finds them. So jobs that
-- come later may start before them. But the share keeps its turns, also if its jobs expire faster than they
-- start.
-- Locks: the caller holds the admission lock; the jobs are in no lane. Why no wake-up is lost: no job becomes
-- ready.
create or replace function queue._return_tags(p_ids bigint[])
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_share record;
begin
  for v_share in
    select x.queue, x.priority, x.share, count(*) * queue._tag_step(x.share) as way
    from (
      select j.queue, j.priority, coalesce(j.options ->> 'share', '') as share
      from unnest(p_ids) u (id)
      cross join lateral (
        select j.queue, j.priority, j.options, j.tag from queue.job_now j where j.id = u.id offset 0) j
      where j.tag is not null) x
    group by x.queue, x.priority, x.share
  loop
    update queue.share_tag t set tag = greatest(t.tag - v_share.way * interval '1 microsecond',
        queue._virtual_time(v_share.queue, v_share.priority, ''))
    where t.ctid = any (array(
      select t.ctid from queue.share_tag t
      where t.queue = v_share.queue and t.priority = v_share.priority and t.key = ''
        and t.share = v_share.share
        and hashtextextended(t.share, 0) = hashtextextended(v_share.share, 0)
      order by t.tick desc limit 1));
  end loop;
  update queue.job_override s set tag = null where s.id = any (p_ids) and s.tag is not null;
end $$;

-- Starts tags in the lanes of a queue and priority, or, after a change of weights, new tags that lie before
-- the old ones. _retag gives them to the jobs that are ready there; the cursor says that there is more to do.
-- (After 2,700 changes no room is left before the old tags; then a change applies only to new jobs.)
-- Locks: the caller holds the admission lock. Why no wake-up is lost: jobs with old tags stay ready.
create or replace function queue._begin_tags(p_queue text, p_priority integer)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.lane l set tag_base = coalesce(l.tag_base - interval '1 year', '{{first_tag}}'),
    retag_from = coalesce(l.tag_base, '{{end_of_tags}}')
  where l.queue = p_queue and l.priority = p_priority and l.kind < {{lane_crashed}}
    and (l.tag_base is null or l.tag_base > '{{least_tag}}');
  if found then
    delete from queue.share_tag t
    where t.queue = p_queue and t.priority = p_priority;
    update queue.cursor k set has_backlog = true
    where k.tick = (select max(m.tick) from queue.cursor m) and not k.has_backlog;
  end if;
end $$;

-- Ends tags in a queue and priority if it has no ready or running jobs and none that wait for slots, and if
-- all shares but '' have been forgotten. Deadlines then count again there.
-- Locks: the caller holds the admission lock. Why no wake-up is lost: there is no job; one whose claim is
-- uncommitted counts, because the claim may be rolled back.
create or replace function queue._end_tags()
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  with busy as materialized (
    select distinct unnest(s.lanes) as lane from queue.semaphore s where s.lanes <> '{}'),
  ended as materialized (
    select l.queue, l.priority from queue.lane l
    where l.tag_base is not null
      and not exists (select from queue.share_tag t
        where t.queue = l.queue and t.priority = l.priority and t.key = '' and t.share <> '')
    group by l.queue, l.priority
    having not bool_or(exists (select from queue.active_job aj where aj.lane = l.lane)
      or l.lane in (select b.lane from busy b))),
  gone as (
    delete from queue.share_tag t using ended e where t.queue = e.queue and t.priority = e.priority)
  update queue.lane l set tag_base = null, retag_from = null
  from ended e where l.queue = e.queue and l.priority = e.priority and l.tag_base is not null;
end $$;

-- The deadline of a job with this place in a lane.
create or replace function queue._deadline_of(p_id bigint, p_place timestamptz)
returns timestamptz language plpgsql stable parallel safe security invoker as $$
begin
  if p_place >= '{{end_of_tags}}' then
    return p_place;
  end if;
  return (
    select coalesce(j.deadline, 'infinity') from queue.job_now j where j.id = p_id);
end $$;
