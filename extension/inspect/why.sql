-- Why a job is not running: explanations in words.

-- Raises: QJ001.
create or replace function queue.why(id bigint)
returns text language plpgsql stable parallel unsafe security definer
set search_path = pg_catalog, pg_temp set jit = off as $$
declare
  v_job record;
  v_no_start text;
begin
  {{if_restricted}}
    perform queue._require_jobs('{operator,reader}', array[why.id]);
  end if;
  select j.id, j.state, j.reason, j.queue, j.task, j.lock, j.scheduled_at, j.worker_id, j.claim, j.started_at,
    j.finished_at, j.error, w.reason as gate, w.key, w.at, l.kind, aj.id as active_id
  into v_job
  from queue.all_jobs j
  left join queue.waiting w on w.id = j.id
  left join queue.active_job aj on aj.id = j.id
  left join queue.lane l on l.lane = aj.lane
  where j.id = why.id;
  if not found then
    perform queue._job_not_found(why.id);
  end if;
  case v_job.state
    when 'succeeded' then return format('it succeeded at %s', v_job.finished_at);
    when 'failed' then return format('it failed at %s: %s%s', v_job.finished_at, coalesce(v_job.reason, ''),
      coalesce(' (' || v_job.error || ')', ''));
    when 'cancelled' then return format('it was cancelled at %s: %s', v_job.finished_at, v_job.reason);
    when 'running' then
      return format('it has been running since %s on worker %s, claim %s%s%s', v_job.started_at,
        v_job.worker_id, v_job.claim, queue._why_running(why.id, v_job.claim),
        '; its worker has been told to abort it: ' || v_job.reason);
    when 'held' then return 'it is held; queue.unhold releases it';
    when 'scheduled' then
      return format('its time has not come: %s', v_job.scheduled_at) || queue._why_scheduled(v_job.id)
        || queue._why_unknown(why.id, v_job.task, 'is');
    when 'waiting', 'upstream_failed' then
      if v_job.reason = 'signal' then
        return queue._why_suspended(why.id);
      end if;
      return case v_job.state when 'waiting' then 'it needs ' else 'a need failed: ' end
        || coalesce(queue._why_needs(why.id, v_job.state = 'upstream_failed'),
          'jobs that are being checked');
    else null;
  end case;
  v_no_start := queue._why_queue(v_job.queue);
  if v_job.gate = 'task_paused' then
    return format('its task %s is paused%s', v_job.task, queue._why_until(v_job.at));
  elsif v_job.gate = 'parked' then
    return case when exists (select from queue.waiting w where w.id = why.id and w.weight is null)
      then 'a large backlog is being admitted, which may contain older jobs of its lock'
      else 'a backlog of jobs with keys or needs is being admitted, the most urgent first' end;
  elsif v_job.gate = 'moving' then
    return 'its key is moving to another shard';
  elsif v_job.gate = 'slot' then
    return concat_ws('; ', v_no_start, queue._why_no_slot(why.id, v_job.key));
  elsif v_job.state = 'blocked' then
    return concat_ws('; ', v_no_start, queue._why_no_turn(why.id, v_job.lock));
  elsif v_job.active_id is null then
    v_job.at := queue._task_paused_until(v_job.task, v_job.queue);
  end if;
  if v_job.at > clock_timestamp() then
    return format('its task %s is paused%s', v_job.task, queue._why_until(v_job.at));
  elsif v_no_start is not null then
    return v_no_start;
  elsif v_job.active_id is null then
    return case when exists (select from queue.pending_settlement h
      where h.job_id = why.id and h.xid = {{shelved}})
      then 'it is shelved, because of a fault that the log of the server names; maintenance tries again'
      when exists (select from queue.pending_settlement h where h.job_id = why.id and h.kind = 'again')
      then 'its last run has just ended; the next fetch or tick admits it again'
      else 'it has not been admitted yet; the next fetches and ticks admit new jobs in turn' end;
  elsif v_job.kind = {{lane_crashed}} then
    return 'it crashed before, so it runs alone, on a worker that runs nothing else';
  end if;
  return coalesce('no slot is free: ' || queue._why_no_slot_left(why.id),
    'it is ready: the next worker with a free slot claims it when its turn comes' || queue._why_share(why.id)
    || queue._why_unknown(why.id, v_job.task, 'was'));
end $$;
comment on function queue.why(bigint) is
  'Explains why a job is not running: the job that holds its lock, the jobs that use its key, its needs,'
    ' how long it is paused or scheduled, or that no live worker serves its queue.';

-- When the timeout or lease of a claim ends or has ended, that its timeout has passed, or that its worker is
-- gone; and which open transaction has locked the claim. Empty text if none of these applies.
create or replace function queue._why_running(p_id bigint, p_claim bigint)
returns text language plpgsql stable parallel safe security invoker as $$
declare
  v_locked constant text := coalesce(
    (select format('; %s has locked the claim, which can''t end before that transaction does', h.holder)
     from queue._claim_holders(array[p_id]) h limit 1), '');
  v_outlook constant text := case v_locked when '' then ': the next tick ends the claim' else '' end;
begin
  return coalesce((
      select format('; its timeout passed at %s; its handler could not be ended and still runs', o.timeout_at)
      from queue._overdue() o where o.id = p_id), '')
    || coalesce((
      select case when l.is_own and l.expires_at <= clock_timestamp()
          then format('; its lease ended at %s%s', l.expires_at, v_outlook)
        when l.is_own then format('; its lease ends at %s', l.expires_at)
        else format('; its timeout ends at %s', l.expires_at - {{timeout_grace}}) end
      from queue.lease l where l.id = p_id and l.claim = p_claim), '')
    || coalesce((
      select format('; its worker was last seen at %s and counts as dead%s', w.last_seen_at, v_outlook)
      from queue.active_job aj
      join queue.worker w on w.id = aj.worker_id
      where aj.id = p_id and (w.gone_at is not null
          or greatest(w.last_seen_at, queue._up_since()) + w.dead_after < clock_timestamp())
        and not exists (select from queue.lease l where l.id = p_id and l.claim = p_claim and l.is_own)), '')
    || v_locked;
end $$;

-- Which workers did not know a job's task; empty text if none. p_verb: is, if the job waits for another one.
create or replace function queue._why_unknown(p_id bigint, p_task text, p_verb text)
returns text language plpgsql stable parallel safe security invoker as $$
begin
  return coalesce((
    select format('; its task %s %s not known to worker %s', queue._task_and_version(p_id, p_task), p_verb,
      u.workers)
    from queue._unknown_since(p_id) u where u.times > 0), '');
end $$;

-- How many of the starts in its queue and priority a job's share has had, for queue.why(). It counts at most
-- 10,000 running jobs and 10,000 that have ended.
create or replace function queue._why_share(p_id bigint)
returns text language plpgsql stable parallel safe security invoker as $$
declare
  v_job record;
  v_starts record;
begin
  select l.queue, l.priority, j.options ->> 'share' as share into v_job
  from queue.active_job aj join queue.lane l on l.lane = aj.lane join queue.job j on j.id = aj.id
  where aj.id = p_id and l.tag_base is not null;
  if v_job.share is null then
    return '';
  end if;
  select count(*) as n, count(*) filter (where j.options ->> 'share' = v_job.share) as of_share into v_starts
  from (
    (select aj.id from queue.active_job aj
     where aj.claimed_at > clock_timestamp() - interval '1 minute' limit 10000)
    union all
    (select f.id from queue.finished f
     where f.finished_at > clock_timestamp() - interval '1 minute'
       and f.started_at > clock_timestamp() - interval '1 minute' limit 10000)) x
  join queue.job_now j on j.id = x.id
  where j.queue = v_job.queue and j.priority = v_job.priority;
  return format('; its share %s has had %s of %s starts in the last minute', v_job.share, v_starts.of_share,
    v_starts.n);
end $$;

-- The needs that a job waits for, or that have failed, at most 20; for queue.why(). While a job under any
-- awaits others, its needs are met: it has started. If some are in queues that the caller may not use, only
-- the ids of all its needs there. p_failed: with what to do.
create or replace function queue._why_needs(p_id bigint, p_failed boolean)
returns text language plpgsql stable parallel safe security invoker as $$
declare
  v_texts text[];
  v_allowed text[] := queue._allowed_queues('{operator,reader}');
  v_awaits boolean := exists (select from queue.need_now d
    where d.job_id = p_id and d.mode & {{ended}} <> 0 and d.class = 'p');
begin
  v_texts := array(
    select format('job %s', d.id)
      || case when queue._allows(v_allowed, j.queue) is not false
      then format(' (%s%s)', coalesce(j.state, 'deleted'), case when p_failed then case j.state
        when 'failed' then ': retry it'
        when 'cancelled' then ': retry it'
        when 'held' then ': unhold it'
        when 'upstream_failed' then ': see why'
        else ': cancel this job, or end it by queue.done' end end) else '' end
    from (select n.id, d.deleted_state, d.is_satisfied or v_awaits and d.mode & {{ended}} = 0
            and d.mode & {{any}} <> 0 as is_met
          from queue._direct_needs(p_id) n
          left join lateral (
            select d.deleted_state, d.is_satisfied, d.mode
            from queue.need_now d
            where d.job_id = p_id and d.need_id = n.id) d on true
          order by n.id) d
    left join lateral (select j.state, j.queue from queue.all_jobs j where j.id = d.id offset 0) j on true
    where queue._allows(v_allowed, j.queue) is false
      or d.is_met is not true
        and case when p_failed
          then coalesce(j.state, d.deleted_state, 'failed')
            in ('failed', 'cancelled', 'held', 'upstream_failed')
          else coalesce(j.state, d.deleted_state, 'failed') <> 'succeeded' end
    limit 21);
  return nullif(array_to_string(v_texts[:20], ', '), '') || case
    when cardinality(v_texts) > 20 then ' and more' else '' end;
end $$;

-- What a suspended job waits for, for queue.why().
create or replace function queue._why_suspended(p_id bigint)
returns text language plpgsql stable parallel safe security invoker as $$
begin
  return coalesce(
    (select format('at its step %s it waits for %s %s%s', queue._step_name(w.step, w.no),
       case when w.signal is null then 'event' else 'signal' end, coalesce(w.signal, w.event),
       coalesce(' until ' || w.until, '')) || queue._why_kept(p_id)
     from queue.suspended w where w.job_id = p_id),
    'the next fetch or tick continues it');
end $$;

-- The names of signals that a job has got and not taken, for queue.why(); empty text if there are none.
create or replace function queue._why_kept(p_id bigint)
returns text language plpgsql stable parallel safe security invoker as $$
begin
  return coalesce((
    select '; it has not taken these signals: ' || string_agg(r.name, ', ' order by r.name)
    from (select distinct r.name from queue.received_signal r where r.job_id = p_id limit 10) r), '');
end $$;

-- What a scheduled job did last, for queue.why(): the step in which it sleeps, the step that has failed and
-- is to run again, or how its last attempt ended; empty text for a job that has not started.
create or replace function queue._why_scheduled(p_id bigint)
returns text language plpgsql stable parallel safe security invoker as $$
begin
  return coalesce((
    select format('; it sleeps at its step %s', queue._step_name(n.name, n.no))
    from queue._sleeping_steps(array[p_id]) n), (
    select format('; its step %s has failed %s: %s', queue._step_name(s.name, s.no),
      case s.failures when 1 then 'once' else s.failures || ' times' end, left(s.error, 200))
    from queue.step s
    where s.job_id = p_id and s.finished_at is null and s.error is not null
    order by s.claim desc, s.failed_at desc limit 1), (
    select format('; its attempt %s %s%s', a.attempt,
      case a.outcome when 'timed_out' then 'timed out' when 'aborted' then 'was aborted'
        else a.outcome end,
      ': ' || left(a.error, 200))
    from queue.attempt a
    where a.job_id = p_id and a.outcome <> 'released'
    order by a.claim desc limit 1), '');
end $$;

-- Claims whose timeout has passed and that their worker has extended since, because it could not end the
-- handler.
create or replace function queue._overdue()
returns table (id bigint,
  timeout_at timestamptz) language plpgsql stable parallel safe security invoker rows 10 as $$
begin
  return query
    select l.id, t.at
    from (select l.id, l.claim, l.expires_at from queue.lease l where l.is_own
      order by l.expires_at desc limit 10000) l
    cross join lateral (
      select aj.claimed_at
      from queue.active_job aj
      where aj.id = l.id and aj.claim = l.claim offset 0) aj
    cross join lateral (
      select aj.claimed_at + (j.options ->> 'timeout')::interval as at from queue.job j
      where j.id = l.id offset 0) t
    where l.expires_at > t.at + {{timeout_grace}};
end $$;

-- The job that has the turn at a lock, apart from p_id; NULL if there is none.
create or replace function queue._turn_of(p_lock text, p_id bigint)
returns bigint language plpgsql stable parallel safe security invoker as $$
begin
  return (
    select m.id
    from (select m.id, 0 as n from queue.lock_member m where m.lock = p_lock and m.has_turn
          union all (select m.id, 1 from queue.lock_member m where m.lock = p_lock and not m.is_late
            order by m.id limit 1)
          union all (select m.id, 2 from queue.lock_member m where m.lock = p_lock
            order by m.id limit 1)) m
    where m.id <> p_id order by m.n limit 1);
end $$;

-- The job that has the turn at a lock, for queue.why().
create or replace function queue._why_no_turn(p_id bigint, p_lock text)
returns text language plpgsql stable parallel safe security invoker as $$
declare
  v_id bigint := queue._turn_of(p_lock, p_id);
begin
  return coalesce(
    (select format('its lock %s is held by job %s', p_lock, j.id)
       || case when not queue._allows(queue._allowed_queues('{operator,reader}'), j.queue) then ''
               else format(' (%s)', j.state)
                 || case when j.finished_at is not null then '; the next fetch or tick passes it on'
                 else '' end end
     from queue.all_jobs j where j.id = v_id),
    format('its lock %s is free; the next fetch or tick passes it on', p_lock));
end $$;
