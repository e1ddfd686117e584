-- Clients that froze in a transaction that had changed or locked a claim, so that nobody can end the claim.

-- Returns whose open transactions have locked the claims of these running jobs, and what ends them, oldest
-- first. xmax is the transaction that has locked the row. A savepoint that was released, or several
-- transactions that hold the row together, are not found. A session's state is hidden from most other roles.
create or replace function queue._claim_holders(p_ids bigint[])
returns table (holder text, fix text) language plpgsql stable parallel safe security invoker rows 1 as $$
begin
  return query
    select case when l.pid is null then format('prepared transaction %L', p.gid)
        else concat('session ', l.pid, ' of ' || a.usename, ' (' || a.state || ')') end,
      case when l.pid is null then format('rollback prepared %L', p.gid)
        else format('select pg_terminate_backend(%s)', l.pid) end
    from queue.active_job aj
    join pg_locks l on l.locktype = 'transactionid' and l.mode = 'ExclusiveLock' and l.granted
      and l.transactionid = aj.xmax
    left join pg_stat_activity a on a.pid = l.pid
    left join pg_prepared_xacts p on p.transaction = aj.xmax and l.pid is null
    where aj.id = any (p_ids)
    group by 1, 2
    order by min(age(aj.xmax)) desc;
end $$;
