-- Jobs that are committed and that admission has not read yet. Private.
create view queue.unadmitted as
select j.id, j.flags, j.queue, j.priority, j.lock, j.scheduled_at, j.deadline, j.needs
from (select k.next_xid, k.in_flight from queue.cursor k order by k.tick desc limit 1) k
cross join lateral (
  select j.id, j.flags, j.queue, j.priority, j.lock, j.scheduled_at, j.deadline, j.needs
  from queue.job j where j.xid >= k.next_xid
  union all
  select j.id, j.flags, j.queue, j.priority, j.lock, j.scheduled_at, j.deadline, j.needs
  from unnest(k.in_flight) x cross join lateral (
    select j.id, j.flags, j.queue, j.priority, j.lock, j.scheduled_at, j.deadline, j.needs from queue.job j
    where j.xid = x offset 0) j
  union all
  select j.id, j.flags, j.queue, j.priority, j.lock, j.scheduled_at, j.deadline, j.needs
  from (select b.from_xid, b.from_id, b.to_xid, 9223372036854775807 as to_id from queue.backlog b
        union all select p.from_xid, p.from_id, p.to_xid, p.to_id from queue.backlog_part p) b
  cross join lateral (
    select j.id, j.flags, j.queue, j.priority, j.lock, j.scheduled_at, j.deadline, j.needs from queue.job j
    where (j.xid, j.id) > (b.from_xid, b.from_id) and (j.xid, j.id) <= (b.to_xid, b.to_id) offset 0) j
  where not exists (select from queue.live v where v.id = j.id) and not exists (select from queue.waiting w where w.id = j.id)
    and not exists (select from queue.finished f where f.id = j.id)
    and not exists (select from queue.lock_member m where m.lock = j.lock and m.id = j.id)
  offset 0) j;
