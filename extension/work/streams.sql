-- Streams: values that a job emits in order while it runs.

-- The numbers have no gaps: a call waits for any other transaction that is emitting to the stream, which can
-- only belong to the same run of the job. So a reader that continues after the last number misses nothing.
-- Locks: the claim's row of queue.active_job, FOR KEY SHARE, as finish_step; then the new row. Why no wake-up
-- is lost: clients that wait are notified as at the end of a job, and also poll (inspect/results.sql).
-- Raises: 22023, QJ001, QJ002, QJ008.
create or replace function queue.emit(id bigint, claim bigint, stream text, value jsonb)
returns bigint language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp {{planner}} as $$
declare
  v_no bigint;
begin
  {{if_restricted}}
    perform queue._require_claims(array[emit.id], array[emit.claim]);
  end if;
  perform queue._check_isolation();
  perform queue._check_name('stream', emit.stream);
  perform queue._check_size('value', emit.value);
  perform queue._lock_claim(emit.id, emit.claim);
  while v_no is null loop
    insert into queue.stream_item (job_id, stream, no, value)
    values (emit.id, emit.stream,
      coalesce((select max(i.no) from queue.stream_item i
                where i.job_id = emit.id and i.stream = emit.stream), 0) + 1,
      coalesce(emit.value, 'null'))
    on conflict on constraint stream_item_pkey do nothing
    returning no into v_no;
  end loop;
  perform queue._notify_waiters(array[emit.id]);
  return v_no;
end $$;
comment on function queue.emit(bigint, bigint, text, jsonb) is
  'Appends a value to a stream of a running job, and returns its number there: 1, 2, 3. In a transaction that'
    ' finishes a step, the value is emitted exactly once. Until the transaction ends, other calls for the'
    ' stream wait, also those that the same handler makes on another connection. Needs READ COMMITTED.'
    ' Readers are notified on the channel of queue.await_result.';

-- Locks: none. Raises: 22023, QJ001.
create or replace function queue.read_stream(id bigint, stream text, after bigint default 0)
returns table (no bigint, value jsonb, emitted_at timestamptz)
language plpgsql stable parallel unsafe security definer rows 100
set search_path = pg_catalog, pg_temp {{planner}} as $$
begin
  {{if_restricted}}
    perform queue._require_jobs('{producer,worker,operator,reader}', array[read_stream.id]);
  end if;
  perform queue._check_name('stream', read_stream.stream);
  if not exists (select from queue.job j where j.id = read_stream.id) then
    perform queue._job_not_found(read_stream.id);
  end if;
  return query
    select x.no, x.value, x.emitted_at
    from (
      select i.no, i.value, i.emitted_at, sum(pg_column_size(i.value)) over (order by i.no) as total,
        row_number() over (order by i.no) as n
      from (select i.no, i.value, i.emitted_at from queue.stream_item i
            where i.job_id = read_stream.id and i.stream = read_stream.stream
              and i.no > coalesce(read_stream.after, 0)
            order by i.no limit 1000) i) x
    where x.n = 1 or x.total <= 1000000
    order by x.no;
end $$;
comment on function queue.read_stream(bigint, text, bigint) is
  'Returns the values that a job has emitted to a stream, in order, after a number: at most 1,000 values,'
    ' and 1 MB as stored. Call it again with the last number. No rows means that there are no more values'
    ' yet, or, if the job has finished, that none will come; queue.await_result tells which, and how to'
    ' wait.';

-- The names are found by the index, one after the other, so the cost does not depend on the number of values.
-- Locks: none. Raises: QJ001.
create or replace function queue.streams(id bigint)
returns table (stream text, items bigint, last_at timestamptz)
language plpgsql stable parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp {{planner}} as $$
begin
  {{if_restricted}}
    perform queue._require_jobs('{producer,worker,operator,reader}', array[streams.id]);
  end if;
  if not exists (select from queue.job j where j.id = streams.id) then
    perform queue._job_not_found(streams.id);
  end if;
  return query
    with recursive found (name, n) as (
      select (select min(i.stream) from queue.stream_item i where i.job_id = streams.id), 1
      union all
      select (select min(i.stream) from queue.stream_item i
              where i.job_id = streams.id and i.stream > f.name), f.n + 1
      from found f where f.name is not null and f.n < 1000)
    select f.name collate "default", l.no, l.emitted_at
    from found f
    cross join lateral (
      select i.no, i.emitted_at from queue.stream_item i
      where i.job_id = streams.id and i.stream = f.name order by i.no desc limit 1) l
    order by f.n;
end $$;
comment on function queue.streams(bigint) is
  'Returns the streams to which a job has emitted values, in the order of their names, at most 1,000: the'
    ' number of values in each, and when it got the last one. queue.read_stream returns the values.';
