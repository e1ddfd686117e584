"""The statements of shards: calls of the functions that extension/cluster/ adds.

Tests: cluster/test_map.py, cluster/test_move.py.
"""

from __future__ import annotations

from pgdefer.database.sql import Statement

START = Statement("select queue.shard_start(:self, cast(cast(:shards as text) as jsonb))")
LEARN = Statement("select queue.shard_learn(cast(cast(:map as text) as jsonb), :self)")
MAP = Statement("select queue.shard_map()")
TRY_LOCK = Statement("select pg_try_advisory_xact_lock(:key)")
UNDER_WAY = Statement("select * from queue.shard_under_way()")
STOPPED = Statement("select * from queue.shard_stopped()")
FIND = Statement("select queue.shard_find(:key)")
DEFER_MANY = Statement("select * from queue.shard_defer_many(cast(cast(:jobs as text) as jsonb))")

LIMIT = Statement("""
    select queue.configure_queue(:queue, jsonb_build_object('max_running', cast(:limit as integer)))
""")

# Moving a slot
# For one step: pgbouncer then gives the session to others. A mover that is frozen keeps no locks.
SET_TIME_LIMITS = Statement("""
    select set_config('lock_timeout', '100ms', true),
      set_config('idle_in_transaction_session_timeout', '10s', true)
""")
MOVER = Statement("select queue.shard_mover(:slot)")
LEAVE = Statement("select queue.shard_leave(:slot, :target)")
LIST = Statement("select queue.shard_list(:slot)")
CATCH_UP = Statement("select queue.shard_catch_up()")
CLOSE = Statement("select queue.shard_close(:slot, :part)")
FORMAT = Statement("select queue.shard_format()")
MAY_RECEIVE = Statement("select queue.shard_may_receive(:slot, :source, :version, :format)")
RECEIVE = Statement("select queue.shard_receive(:slot, :source, :version, :format)")
PARTS = Statement("select * from queue.shard_parts(:slot)")
HOLD_AHEAD = Statement("select queue.shard_hold_ahead(:slot, :part, :started)")
HOLD = Statement("select * from queue.shard_hold(:slot, :part, :started)")
STAY = Statement("select queue.shard_stay(:slot)")
UNHOLD = Statement("select queue.shard_unhold(:slot, :part)")
PART_LEAVE = Statement("select queue.shard_part_leave(:slot, :part, :started)")
PART_JOBS = Statement("select cast(queue.shard_part_jobs(:slot, :part) as text)")
PART_ARRIVE = Statement(
    "select * from queue.shard_part_arrive(cast(cast(:carried as text) as jsonb))"
)
PART_GONE = Statement("select queue.shard_part_gone(:slot, :part, cast(:receipt as uuid))")
LEAVE_EMPTY = Statement("select * from queue.shard_leave_empty(:slot)")
LEFT_EMPTY = Statement("""
    select p.part from queue.shard_part p
    where p.slot = :slot and p.state = 'leaving' and p.is_last and not exists (
      select from queue.shard_sent s where s.slot = p.slot and s.part = p.part)
""")
EMPTY_PARTS = Statement("""
    select cast(jsonb_agg(queue.shard_part_jobs(:slot, p)) as text)
    from unnest(cast(:parts as integer[])) p
""")
ARRIVE_EMPTY = Statement("""
    select cast(p ->> 'part' as integer), cast(a.receipt as text)
    from jsonb_array_elements(cast(cast(:carried as text) as jsonb)) p
    cross join lateral queue.shard_part_arrive(p) a
""")
GONE_EMPTY = Statement("""
    select queue.shard_part_gone(:slot, p, r)
    from unnest(cast(:parts as integer[]), cast(cast(:receipts as text[]) as uuid[])) x (p, r)
""")
MOVED = Statement("select queue.shard_moved(:slot, :version)")
