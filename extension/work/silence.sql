-- If all workers are silent at once, that says nothing about any of them, so their silence counts afresh.
-- Tests: work/reap.sql, work/reap.silence.spec.

-- Whether no worker has been seen for the least dead_after, and for 25 s. Then the cause may be the server
-- (its machine was paused), a pooler in front of it, or a clock that was set forward. So live workers must
-- get their dead_after once more: otherwise they would be given up, and their jobs would run twice. But all
-- may have died, too. So it is true only once, until one of them is seen again. It is also true if the clock
-- was set back to before p_up_since.
create or replace function queue._are_all_silent(p_now timestamptz, p_up_since timestamptz)
returns boolean language plpgsql volatile parallel safe security invoker as $$
begin
  return p_up_since > p_now + interval '10 s' or coalesce((
    select max(w.last_seen_at) + greatest(min(w.dead_after), interval '25 s') < p_now
      and max(w.last_seen_at) > p_up_since
    from queue.worker w where w.gone_at is null), false);
end $$;

-- Counts silence from p_now on only. Workers that were silent while another one was seen are marked as gone.
-- Returns false if another session is doing this, or holds the row of queue.installation for something else.
-- Then the caller's worker must not be marked as seen (heartbeat): the others would not know yet that silence
-- counts afresh.
-- Locks: the row of queue.installation, and rows of queue.worker, by skip locked. Two sessions:
-- work/reap.silence.spec.
create or replace function queue._restart_grace(p_now timestamptz)
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
begin
  perform from queue.installation i for no key update skip locked;
  if not found then
    return false;
  elsif not queue._are_all_silent(clock_timestamp(), queue._up_since()) then
    return true;  -- another session has done it since the caller looked
  end if;
  update queue.worker w set gone_at = p_now
  where w.id = any (array(select w.id from queue.worker w where w.gone_at is null
    and w.last_seen_at + w.dead_after < (
      select max(s.last_seen_at) from queue.worker s where s.gone_at is null)
    and not (w.info ? 'session' and queue._is_in_handler(w.info)) for update skip locked));
  update queue.installation i set up_since = p_now where i.era = queue._era() and i.written = i.xmin;
  if found then
    update queue.installation i set written = i.xmin;  -- as in _begin_era
  end if;
  return true;
end $$;
