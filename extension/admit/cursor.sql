-- The cursor: how far the log has been read, and the due mark, before which nothing is due.
-- Tests: admit/admission.sql, admit/admission.two.spec, recur/schedules.sql.

-- Records that everything visible in p_upto has been read, except the transaction p_own. The update changes
-- the key, because then the current row is read first, like a new row.
-- Locks: the caller holds the admission lock.
create or replace function queue._move_cursor(
  p_tick bigint, p_upto pg_snapshot, p_own xid8, p_high_id bigint, p_has_backlog boolean,
  p_due_at timestamptz)
returns void language plpgsql volatile parallel unsafe security invoker as $$
begin
  update queue.cursor k
  set tick = p_tick + 1, next_xid = pg_snapshot_xmax(p_upto), in_flight = queue._in_flight(p_upto, p_own),
    high_id = p_high_id,
    has_backlog = p_has_backlog, due_at = p_due_at
  where k.tick = p_tick;
end $$;

-- The transactions that were in flight in a snapshot, including p_own.
create or replace function queue._in_flight(p_upto pg_snapshot, p_own xid8)
returns xid8[] language plpgsql immutable parallel safe security invoker as $$
begin
  if pg_snapshot_xmin(p_upto) = pg_snapshot_xmax(p_upto) then
    return '{}'::xid8[];
  end if;
  return array(select x from pg_snapshot_xip(p_upto) x union select p_own
    where p_own < pg_snapshot_xmax(p_upto) order by 1);
end $$;

-- Whether the log may contain rows that have not been admitted. It reads only the end of the log, for callers
-- that need nothing else of _admit.
-- Locks: the caller holds the admission lock.
create or replace function queue._has_news()
returns boolean language plpgsql volatile parallel unsafe security invoker as $$
begin
  return (
    select {{has_news}} from queue.cursor_now k);
end $$;

-- If the clock was set back past the due mark, moves the mark back too. Otherwise the next admission might
-- begin at the mark, and miss a new timer before it.
-- Locks: the caller holds the admission lock, which protects the cursor.
create or replace function queue._rewind_due_mark()
returns void language plpgsql volatile parallel unsafe security invoker as $$
declare
  v_tick bigint;
  v_due_at timestamptz;
begin
  select k.tick, k.due_at into v_tick, v_due_at from queue.cursor_now k;
  if v_due_at > clock_timestamp() then
    update queue.cursor k set due_at = '-infinity' where k.tick = v_tick;
  end if;
end $$;
