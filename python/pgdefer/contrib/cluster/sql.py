"""The statements of shards: calls of the functions that extension/cluster/ adds."""

from __future__ import annotations

from pgdefer.database.sql import Statement

START = Statement("select queue.shard_start(:self, cast(cast(:shards as text) as jsonb))")
LEARN = Statement("select queue.shard_learn(cast(cast(:map as text) as jsonb), :self)")
MAP = Statement("select queue.shard_map()")
FIND = Statement("select queue.shard_find(:key)")
DEFER_MANY = Statement("select * from queue.shard_defer_many(cast(cast(:jobs as text) as jsonb))")

LIMIT = Statement("""
    select queue.configure_queue(:queue, jsonb_build_object('max_running', cast(:limit as integer)))
""")

# Moving a slot
SET_LOCK_TIMEOUT = Statement(
    "select set_config('lock_timeout', '100ms', false) from queue.version()"
)
MOVER = Statement("select queue.shard_mover(:slot)")
LEAVE = Statement("select queue.shard_leave(:slot, :target)")
LIST = Statement("select queue.shard_list(:slot)")
CATCH_UP = Statement("select queue.shard_catch_up()")
CLOSE = Statement("select queue.shard_close(:slot, :part)")
RECEIVE = Statement("select queue.shard_receive(:slot, :source, :version)")
PARTS = Statement("select * from queue.shard_parts(:slot)")
HOLD = Statement("select * from queue.shard_hold(:slot, :part, :started)")
UNHOLD = Statement("select queue.shard_unhold(:slot, :part)")
PART_LEAVE = Statement("select queue.shard_part_leave(:slot, :part, :started)")
PART_JOBS = Statement("select cast(queue.shard_part_jobs(:slot, :part) as text)")
PART_ARRIVE = Statement(
    "select queue.shard_part_arrive(:slot, :part, cast(cast(:jobs as text) as jsonb))"
)
PART_GONE = Statement("select queue.shard_part_gone(:slot, :part)")
LEAVE_EMPTY = Statement("select * from queue.shard_leave_empty(:slot)")
ARRIVE_EMPTY = Statement("""
    select queue.shard_part_arrive(:slot, p, '[]') from unnest(cast(:parts as integer[])) p
""")
GONE_EMPTY = Statement("""
    select queue.shard_part_gone(:slot, p) from unnest(cast(:parts as integer[])) p
""")
MOVED = Statement("select queue.shard_moved(:slot, :version)")
