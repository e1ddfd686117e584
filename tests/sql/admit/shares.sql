-- Shares: turns by weight within a queue and priority.

select plan(114);

set pgdefer.notify = off;

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- The names of the jobs that start, singly or in batches.
create function pg_temp.starts(n integer, batch integer default 1, queues text[] default null) returns text language plpgsql as $$
declare
  v_names text[];
  v_found text[];
begin
  for i in 1 .. ceil(starts.n::numeric / batch) loop
    select array_agg(f.args ->> 'name' order by f.n) into v_found
    from queue.fetch((select max(w.id) from queue.workers w), starts.queues, least(batch, starts.n - coalesce(cardinality(v_names), 0))) with ordinality
      f (id, claim, task, args, queue, priority, lock, attempt, scheduled_at, deadline, timeout, headers, parent, n);
    exit when v_found is null;
    v_names := v_names || v_found;
  end loop;
  return array_to_string(v_names, ' ');
end $$;
\ir slots.helpers.psql
create function pg_temp.defer(names text, share text default null, more jsonb default '{}', options jsonb default '{}') returns bigint language plpgsql as $$
declare
  v_id bigint;
begin
  select min(d) into v_id from queue.defer_many((
    select jsonb_agg(jsonb_build_object('task', 't', 'args', jsonb_build_object('name', u.name),
      'options', defer.options || jsonb_build_object('share', defer.share)) || defer.more order by u.n)
    from regexp_split_to_table(defer.names, ' ') with ordinality u (name, n))) d;
  return v_id;
end $$;

-- Turns
select pg_temp.defer('A1 A2 A3', 'A'), pg_temp.defer('B1 B2 B3', 'B') \g /dev/null
select is(pg_temp.starts(9), 'A1 B1 A2 B2 A3 B3', 'in turns');
select pg_temp.finish_all();
select pg_temp.defer('A1 A2 A3', 'A'), pg_temp.defer('n1 n2 n3'), pg_temp.defer('B1', 'B') \g /dev/null
select is(pg_temp.starts(9, 4), 'A1 n1 B1 A2 n2 A3 n3', 'jobs without a share are one share, also in batches');
select pg_temp.finish_all();

-- A share that asks for much does not delay the others, however much was there before.
select queue.defer('t', '{"name": "A"}', options => '{"share": "A"}') from generate_series(1, 500) \g /dev/null
select pg_temp.starts(30, 7) \g /dev/null
select pg_temp.defer(x || '1', x) from unnest(string_to_array('B C D E F G H I J K', ' ')) x \g /dev/null
select queue.tick() \g /dev/null
select is((select count(distinct x) from unnest(string_to_array(pg_temp.starts(20, 5), ' ')) x), 11::bigint, 'all ten start within the next 20 claims');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.finish_all();
select queue.cancel(j.id) from queue.jobs j where j.state = 'ready' order by j.id limit 20 \g /dev/null
select is((select count(*) from queue.jobs j where j.state = 'ready'), 440::bigint, 'more is ready');
select queue.delete(array(select j.id from queue.jobs j where j.state = 'ready')) \g /dev/null
select pg_temp.defer('A1 A2 A3', 'A'), pg_temp.defer('L1 L2 L3', 'L') \g /dev/null
select is(pg_temp.starts(9), 'A1 L1 A2 L2 A3 L3', 'cancelled and deleted jobs do not count');
select pg_temp.finish_all();

-- If later jobs of their share are ready, the next ones that come get the turns.
select pg_temp.defer('k1 k2 k3 k4', 'k'), pg_temp.defer('A1 A2 A3', 'A') \g /dev/null
select queue.tick() \g /dev/null
select queue.cancel(j.id) from queue.jobs j where j.state = 'ready' and j.args ->> 'name' in ('A1', 'A2') \g /dev/null
select is(pg_temp.starts(2), 'k1 k2', 'the cancelled jobs would have started');
select pg_temp.defer('k5', 'k') \g /dev/null
select queue.tick() \g /dev/null
select is_empty('select * from queue.check()', 'in order: the share is behind the first ready job');
select pg_temp.defer('A4 A5 A6', 'A') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.starts(9), 'k3 A3 A4 k4 A5 k5 A6', 'later jobs get the turns of those that were cancelled');
select pg_temp.finish_all();

-- Weights
select queue.configure_share('heavy', '{"weight": 3}'), queue.configure_share('team*', '{"weight": 2}'), queue.configure_share('team one', '{"weight": 1}');
select pg_temp.defer('H H H H H H H H H', 'heavy'), pg_temp.defer('t t t t t t', 'team two'), pg_temp.defer('o o o', 'team one') \g /dev/null
select is((select string_agg(x, '' order by x) from unnest(string_to_array(pg_temp.starts(6), ' ')) x), 'HHHott', 'by weight, of the longest pattern');
select queue.configure_share('heavy', '{"weight": null}');
select is((select string_agg(x, '' order by x) from unnest(string_to_array(pg_temp.starts(4), ' ')) x), 'Hott', 'changed for what is ready');
select is_empty('select * from queue.check()', 'in order');
select is(pg_temp.starts(20) is null, false, 'the rest');
select pg_temp.finish_all();

select queue.configure_share('heavy', '{"weight": 3}');
select queue.configure_share('w*', '{"weight": 2}'), queue.configure_share('w w*', '{"weight": 5}');
select is(array[queue._tag_step('w'), queue._tag_step('w ww'), queue._tag_step('x')], '{50000,20000,100000}', 'the longest of several patterns');

select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 't', 'queue', 'ratio', 'options', jsonb_build_object('share', case when n % 2 = 0 then 'heavy' else 'light' end))) from generate_series(1, 3000) n)) \g /dev/null
select queue.tick() from generate_series(1, 4) \g /dev/null
select pg_temp.starts(1600, 100, '{ratio}') \g /dev/null
select results_eq($$select count(*) from queue.active_job aj join queue.job j on j.id = aj.id where aj.claim is not null group by j.options ->> 'share' order by 1$$, '{400,1200}'::bigint[], '3 to 1');
select queue.configure_share('light', '{"weight": 2}');
select isnt((select count(*) from queue.lane l where l.retag_from is not null), 0::bigint, 'of many ready jobs some get their new tags later');
select queue.tick() from generate_series(1, 4) \g /dev/null
select is((select count(*) from queue.lane l where l.retag_from is not null), 0::bigint, 'by itself');
select queue.configure_share('light', '{"weight": null}');
select pg_temp.finish_all();
select queue.pause('ratio') \g /dev/null
select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 't', 'queue', 'many', 'options', jsonb_build_object('share', 's' || n % 1000)) order by n / 3) from generate_series(0, 2999) n)) \g /dev/null
select queue.tick() from generate_series(1, 4) \g /dev/null
select pg_temp.starts(1000, 100, '{many}') \g /dev/null
select is((select count(distinct j.options ->> 'share') from queue.active_job aj join queue.job j on j.id = aj.id where aj.claim is not null), 1000::bigint, 'a thousand shares have had one turn each');
select pg_temp.finish_all();
select is_empty('select * from queue.check()', 'in order');
select queue.pause('many') \g /dev/null

-- A share that has long asked for nothing has saved up no turns; what is below the virtual time goes bit by bit.
select pg_temp.defer(x, x, '{"queue": "idle"}') from (select 's' || n as x from generate_series(1, 30) n) s \g /dev/null
select pg_temp.defer('Z Z', 'Z', '{"queue": "idle"}'), pg_temp.defer(rtrim(repeat('A ', 60)), 'A', '{"queue": "idle"}') \g /dev/null
select is(length(regexp_replace(pg_temp.starts(62, 62, '{idle}'), '[^A]', '', 'g')), 30, 'each share starts, and one of them much');
select pg_temp.defer('Z1 Z2 Z3', 'Z', '{"queue": "idle"}') \g /dev/null
select queue.tick() \g /dev/null
select is((select count(*) from queue.share_tag t where t.queue = 'idle' and t.share ~ '^s'), 14::bigint, 'twice as many tags go as come, and ten');
select is(pg_temp.starts(6, 1, '{idle}'), 'A Z1 A Z2 A Z3', 'whoever comes back takes turns at once');
select pg_temp.finish_all();
-- The virtual time is that of the first job in all lanes that is ready, not of one that runs.
select pg_temp.defer('A A A A A', 'A', '{"queue": "idle", "concurrency_key": "I", "concurrency_limit": 9}'), pg_temp.defer('N1 N2', 'N', '{"queue": "idle"}') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.starts(4, 1, '{idle}'), 'A N1 A N2', 'a job of another lane that is farther back counts for nothing');
select pg_temp.defer('M1 M2', 'M', '{"queue": "idle"}') \g /dev/null
select queue.tick() \g /dev/null
select is(pg_temp.starts(4, 1, '{idle}'), 'A M1 A M2', 'nor does one that runs');
-- What comes back late has its turn, but takes the virtual time back by a hundred turns at most.
select pg_temp.defer('late late', 'late', '{"queue": "back"}') as late, pg_temp.defer(rtrim(repeat('A ', 250)), 'A', '{"queue": "back"}') \gset
select queue.tick() \g /dev/null
select queue.hold(:late), queue.hold(:late + 1) \g /dev/null
select pg_temp.starts(220, 110, '{back}') \g /dev/null
select queue.unhold(:late) \g /dev/null
select is(min(aj.deadline) filter (where aj.id <> :late) - min(aj.deadline) filter (where aj.id = :late), interval '10 s', 'a hundred turns')
from queue.active_job aj join queue.job j on j.id = aj.id where j.queue = 'back' and aj.claim is null;
select is_empty('select * from queue.check()', 'in order');
select pg_temp.finish_all();
select queue.delete_queue(q, true) from unnest('{idle,back}'::text[]) q \g /dev/null


-- The first share comes to a queue in which many jobs are already ready.
select queue.defer('t', '{"name": "n"}', 'old', lock => case when n % 3 = 0 then 'l' || n end, deadline => case when n % 2 = 0 then now() + interval '1 day' end,
  concurrency_key => case when n % 5 = 0 then 'key' || n % 2 end, concurrency_limit => 3) from generate_series(1, 1300) n \g /dev/null
select queue.tick() \g /dev/null
select pg_temp.starts(5, 5, '{old}') \g /dev/null
select pg_temp.defer('B1 B2 B3', 'B', '{"queue": "old"}') \g /dev/null
select queue.tick() from generate_series(1, 2) \g /dev/null
select is(length(replace(replace(pg_temp.starts(8, 2, '{old}'), 'n', ''), ' ', '')), 6, 'it gets its turns');
select is_empty('select * from queue.check()', 'in order');
select queue.tick() from generate_series(1, 5) \g /dev/null
select is((select count(*) from queue.active_job aj where aj.deadline > '0001-01-01' and aj.claim is null), 0::bigint, 'all that was ready has a tag');
select is((select count(*) from queue.lane l where l.retag_from is not null), 0::bigint, 'and no more is to be done');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.finish_all();
select queue.delete_queue('old', true) \g /dev/null

-- Priorities come before shares, and shares take turns at keys.
select pg_temp.defer('a1 a2', 'A'), pg_temp.defer('b1', 'B'), pg_temp.defer('A1 A2', 'A', '{"priority": 1}') \g /dev/null
select is(pg_temp.starts(9), 'A1 A2 a1 b1 a2', 'priority first');
select pg_temp.finish_all();
select pg_temp.defer('a1 a2 a3 a4', 'A', '{"concurrency_key": "K", "concurrency_limit": 2}') \g /dev/null
select queue.tick() \g /dev/null
select pg_temp.defer('b1 b2 b3', 'B', '{"concurrency_key": "K", "concurrency_limit": 2}'), pg_temp.defer('a5', 'A') \g /dev/null
select is(pg_temp.starts(9), 'a1 a2 a5', 'a limit holds, and its waiting jobs delay no others of the share');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.finish_all();
select is(pg_temp.starts(9), 'a3 b1', 'slots go in turns');
select pg_temp.finish_all();
select is(pg_temp.starts(9), 'a4 b2', 'to each share');
select pg_temp.finish_all();
select is(pg_temp.starts(9), 'b3', 'that has any');
select pg_temp.finish_all();

-- A job that was ready, and goes to wait as its key has a lower limit now, is the first of those that wait.
select pg_temp.defer('w', 'A', '{"concurrency_key": "F", "concurrency_limit": 2}', '{"held": true}') as w, pg_temp.defer('a1 a2', 'A', '{"concurrency_key": "F", "concurrency_limit": 2}') \gset
select queue.tick() \g /dev/null
select queue.unhold(:w) \g /dev/null
select queue.configure_key('F', '{"limit": 1}');
select is(pg_temp.starts(9), 'a1', 'one slot');
select pg_temp.finish_all();
select is(pg_temp.starts(9), 'a2', 'goes to the one that was ready');
select pg_temp.finish_all();
select is(pg_temp.starts(9), 'w', 'then to the one that has a lesser id');
select pg_temp.finish_all();

select pg_temp.defer('a1 a2 a3', 'A', '{"queue": "why"}'), pg_temp.defer('b1', 'B', '{"queue": "why"}') \g /dev/null
select is(pg_temp.starts(3, 3, '{why}'), 'a1 b1 a2', 'three start');
select is(queue.why(max(j.id)), 'it is ready: the next worker with a free slot claims it when its turn comes; its share A has had 2 of 3 starts in the last minute', 'why says what its share has had')
from queue.jobs j where j.args ->> 'name' = 'a3' and j.state = 'ready' and j.queue = 'why';
select is(pg_temp.starts(1), 'a3', 'it starts');
select pg_temp.finish_all();

-- The head of a lock is its oldest.
select pg_temp.defer('a1 a2 a3', 'A'), pg_temp.defer('x1', 'X', '{"lock": "L"}'), pg_temp.defer('y1', 'Y', '{"lock": "L"}') \g /dev/null
select is(pg_temp.starts(9), 'a1 x1 a2 a3', 'one of a lock');
select pg_temp.finish_all();
select is(pg_temp.starts(9), 'y1', 'then the next');
select pg_temp.finish_all();

-- A weight counts at once, also if its share had jobs in other queues before.
select pg_temp.defer('o', 'W', jsonb_build_object('queue', 'old' || n)) from generate_series(1, 9) n \g /dev/null
select pg_temp.starts(9) \g /dev/null
select pg_temp.finish_all();
select queue.defer('t', jsonb_build_object('name', x), queue => 'new', options => jsonb_build_object('share', x)) from unnest('{W,V}'::text[]) x, generate_series(1, 40) \g /dev/null
select queue.tick() \g /dev/null
select queue.configure_share('W', '{"weight": 3}') \g /dev/null
select is((select count(*) from unnest(string_to_array(pg_temp.starts(40, 1, '{new}'), ' ')) x where x = 'W'), 30::bigint, 'three of four');
select queue.configure_share('W', '{"weight": null}') \g /dev/null
select pg_temp.finish_all();
select pg_temp.starts(40, 40, '{new}'), pg_temp.finish_all() \g /dev/null

-- Also where the slots of a key are in use: what was ready goes before what waits.
select pg_temp.defer('a1 a2 a3', 'A', '{"concurrency_key": "back", "concurrency_limit": 1}'), pg_temp.defer('b1 b2', 'B', '{"concurrency_key": "back", "concurrency_limit": 1}') \g /dev/null
select is(pg_temp.starts(9), 'a1', 'the only slot');
select pg_temp.finish_all('released');
select is(pg_temp.starts(9), 'a1', 'released, it gets the slot again');
select pg_temp.finish_all('released');
select queue.hold(j.id), queue.unhold(j.id) from queue.jobs j where j.args ->> 'name' = 'a1' and j.finished_at is null \g /dev/null
select is(pg_temp.starts(9), 'b1', 'its slot goes on while it is held');
select pg_temp.finish_all();
select is(pg_temp.starts(9), 'a1', 'but then it is next');
select pg_temp.finish_all();
select is_empty('select * from queue.check()', 'in order too');
select is(pg_temp.starts(9), 'a2', 'the shares go on in turns');
select pg_temp.finish_all(), pg_temp.starts(9), pg_temp.finish_all(), pg_temp.starts(9), pg_temp.finish_all() \g /dev/null

-- Jobs that come back: after a release or an operation they keep their place; a retry takes a new turn.
select pg_temp.defer('a1 a2 a3', 'A') as a, pg_temp.defer('b1 b2 b3', 'B') as b \gset
select is(pg_temp.starts(2), 'a1 b1', 'two begin');
select pg_temp.finish_all('released');
select is(pg_temp.starts(2), 'a1 b1', 'released, they are first again');
select queue.fail(j.id, j.claim, 'x', options => '{"retry_in": 0}') from queue.jobs j where j.state = 'running' and j.id = :a \g /dev/null
select queue.hold(:b + 1), queue.unhold(:b + 1), queue.set_args(:b + 1, '{"name": "b2"}') \g /dev/null
select is(pg_temp.starts(9), 'a2 b2 a3 b3 a1', 'a retry comes last in its share, a held job keeps its place');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.finish_all();
select pg_temp.defer('a1 a2', 'A') as a, pg_temp.defer('b1 b2', 'B') as b \gset
select queue.tick(), queue.hold(:a), queue.unhold(:a) \g /dev/null
select is(pg_temp.starts(1), 'a1', 'a job that was held comes first');
select pg_temp.finish_all(), queue.retry(array[:a]) \g /dev/null
select is(pg_temp.starts(9), 'b1 a2 b2 a1', 'but last in its share if it is retried once it has succeeded');
select pg_temp.finish_all();
select pg_temp.defer('a1 a2 a3 a4', 'A') as a, pg_temp.defer('b1 b2 b3', 'B') as b \gset
select queue.tick() \g /dev/null
select queue.move(array[:a, :a + 1], 'other'), queue.set_priority(array[:b], -1) \g /dev/null
select pg_temp.defer('a5', 'A') \g /dev/null
select is(pg_temp.starts(9, 1, '{default}'), 'b2 a3 b3 a5 a4 b1', 'a job that leaves costs its share nothing');
select is(pg_temp.starts(9, 1, '{other}'), 'a1 a2', 'and keeps it');
select is_empty('select * from queue.check()', 'in order');
select pg_temp.finish_all();
select pg_temp.defer('a1 a2 a3', 'A') as a, pg_temp.defer('b1 b2 b3', 'B') as b \gset
select queue.tick() \g /dev/null
select queue.pause(task => 't'), queue.resume(task => 't') \g /dev/null
select is(pg_temp.starts(9), 'a1 b1 a2 b2 a3 b3', 'nor does a job that waits for its task');
select pg_temp.finish_all();

-- Within a share by deadline and id, if admitted together; fetch's deadline_within compares deadlines.
select pg_temp.defer('a1', 'A'), pg_temp.defer('a2', 'A', '{"deadline": "2990-01-01Z"}'), pg_temp.defer('b1', 'B'), pg_temp.defer('b2', 'B', '{"deadline": "2980-01-01Z"}') \g /dev/null
select is(pg_temp.starts(9), 'a2 b2 a1 b1', 'by deadline within a share');
select pg_temp.finish_all();
select pg_temp.defer('a1', 'A'), pg_temp.defer('a2', 'A', jsonb_build_object('deadline', now() + interval '1 hour')) \g /dev/null
select is((select array_agg(f.args ->> 'name') from queue.fetch(:worker, null, 5, '{"deadline_within": "1 day"}') f), '{a2}', 'deadline_within');
select is((select array_agg(f.args ->> 'name') from queue.fetch(:worker, null, 5, '{"tasks": ["t"]}') f), '{a1}', 'tasks');
select pg_temp.finish_all();

-- Names
select queue.register_task('shared', '{"share": "tenant {name}"}');
select queue.defer('shared', '{"name": "x"}'), queue.defer('shared', '{"name": "x"}', options => '{"share": ""}'), queue.defer('shared', '{"name": "x"}', options => '{"share": "own {name}"}') \g /dev/null
select results_eq($$select j.options ->> 'share' from queue.job j where j.task = 'shared' order by j.id$$, '{tenant x,NULL,own x}'::text[], 'templates, a task''s default, and none in its place');
select throws_ok(call, '22023', null, call) from (values
  ($$select queue.defer('t', options => '{"share": 1}')$$), ($$select queue.defer('t', options => '{"share": {}}')$$),
  ($$select queue.defer('t', options => '{"share": "{field}"}')$$),
  ($$select queue.defer('t', options => jsonb_build_object('share', repeat('x', 1001)))$$),
  ($$select queue.defer('t', jsonb_build_object('n', repeat('x', 999)), options => '{"share": "ab{n}"}')$$),
  ($$select queue.register_task('t', jsonb_build_object('share', repeat('x', 1001)))$$),
  ($$select queue.configure_share('x', '{"weight": 0}')$$), ($$select queue.configure_share('x', '{"weight": -1}')$$),
  ($$select queue.configure_share('x', '{"weight": "NaN"}')$$), ($$select queue.configure_share('x', '{"weight": "Infinity"}')$$),
  ($$select queue.configure_share('x', '{"weight": 1e400}')$$), ($$select queue.configure_share('x', '{"weight": 1e-9}')$$),
  ($$select queue.configure_share('x', '{"weight": "2"}')$$), ($$select queue.configure_share('x', '{}')$$), ($$select queue.configure_share('x', null)$$),
  ($$select queue.configure_share('x', '{"height": 1}')$$), ($$select queue.configure_share('', '{"weight": 1}')$$),
  ($$select queue.configure_share(null, '{"weight": 1}')$$), ($$select queue.configure_share(repeat('x', 1001), '{"weight": 1}')$$)) v (call);

select pg_temp.starts(100, 10) \g /dev/null
select pg_temp.finish_all();
select cmp_ok((select count(*) from queue.share_tag t where t.queue = 'default'), '<', 30::bigint, 'tags that are no longer needed are gone');

-- The view
select queue.configure_share('V*', '{"weight": 3}');
select pg_temp.defer('V1 V2 V3 V4 V5', 'V', '{"queue": "view"}'), pg_temp.defer('W1 W2 W3 W4', 'W', '{"queue": "view"}'), pg_temp.defer('n1', null, '{"queue": "view"}') \g /dev/null
create function pg_temp.shares(queue text) returns text language sql as $$
  select string_agg(format('%s: %s of weight %s, %s started', x.share, x.waiting, x.weight, x.started), '; ' order by x.share)
  from queue.shares x where x.queue = shares.queue;
$$;
select queue.tick() \g /dev/null
select is(pg_temp.shares('view'), ': 1 of weight 1, 0 started; V: 5 of weight 3, 0 started; W: 4 of weight 1, 0 started', 'the view shows who waits');
select is(pg_temp.starts(6, 1, '{view}'), 'V1 W1 n1 V2 V3 V4', 'they start');
select pg_temp.finish_all();
select is(pg_temp.shares('view'), ': 0 of weight 1, 1 started; V: 1 of weight 3, 4 started; W: 3 of weight 1, 1 started', 'and who started');
select pg_temp.starts(9, 9, '{view}') \g /dev/null
select pg_temp.finish_all();
select pg_temp.defer('a1 a2 a3', 'A', '{"queue": "view k"}', '{"concurrency": [{"key": "vk", "limit": 1}]}'), pg_temp.defer('b1', 'B', '{"queue": "view k"}', '{"concurrency": [{"key": "vk", "limit": 1}]}') \g /dev/null
select is(pg_temp.starts(1, 1, '{"view k"}'), 'a1', 'one has the slot');
select is(pg_temp.shares('view k'), 'A: 3 of weight 1, 1 started; B: 1 of weight 1, 0 started', 'those that wait for it count, as far as turns show it');
select is((select count(*) from queue.shares x where x.queue = 'view' and x.waiting > 0), 0::bigint, 'nothing waits there any more');

-- A greater weight brings a job below the low mark of its lane.
select pg_temp.defer('p p p p p', 'far', '{"queue": "marks"}'), pg_temp.defer('last', 'far', '{"queue": "marks"}', '{"concurrency": [{"key": "marks", "limit": 1}]}') \g /dev/null
select queue.tick() \g /dev/null
select queue._raise_marks(array(select l.lane from queue.lane l where l.queue = 'marks'));
select queue.configure_share('far', '{"weight": 10}');
select queue.tick() \g /dev/null
select is(pg_temp.starts(9, 9, '{marks}'), 'p p p p p last', 'it starts');
select pg_temp.finish_all();

-- Two lanes of a queue and priority, of which only one has its new tags: one admission brings jobs to both,
-- one makes jobs of both wait for a slot of one key.
select pg_temp.defer('p1 p2', 'two', '{"queue": "lanes"}'), pg_temp.defer('x1', 'other', '{"queue": "lanes", "concurrency_key": "lane", "concurrency_limit": 9}'), pg_temp.defer('k1 k2', 'two', '{"queue": "lanes"}', '{"concurrency": [{"key": "lanes", "limit": 1}]}') \g /dev/null
select queue.tick() \g /dev/null
select queue.configure_share('two', '{"weight": 2}');
select is_empty('select * from queue.check()', 'old tags of a share that has no new one are no error');
-- as after the step of _retag that ends with the first lane
update queue.lane l set retag_from = null where l.lane = (select min(m.lane) from queue.lane m where m.queue = 'lanes');
select is((select array_agg(l.retag_from is null order by l.lane) from queue.lane l where l.queue = 'lanes'), '{t,f}', 'one lane is done');
select pg_temp.defer('p3 p4', 'two', '{"queue": "lanes"}'), pg_temp.defer('e1', 'two', '{"queue": "lanes"}', '{"expires_at": "2990-01-01Z"}') \g /dev/null
select pg_temp.defer('k3', 'two', '{"queue": "lanes"}', '{"concurrency": [{"key": "lanes", "limit": 1}]}') \g /dev/null
select lives_ok('select queue._admit(100)', 'jobs of both lanes come in');
select queue.tick() from generate_series(1, 4) \g /dev/null
select is_empty('select * from queue.check()', 'each job and each share has one tag');
select is((select count(*) from queue.lane l where l.retag_from is not null), 0::bigint, 'the other lane follows');
select is(length(pg_temp.starts(9, 9, '{lanes}')), 20, 'all that may start does');
select pg_temp.finish_all();
-- After so many changes of weights that there is no room left before the oldest tags, nothing changes any more.
select pg_temp.defer('a1 a2', 'A', '{"queue": "full"}'), pg_temp.defer('b1 b2', 'B', '{"queue": "full"}') \g /dev/null
select queue.tick() \g /dev/null
update queue.lane l set tag_base = l.tag_base - interval '2701 years' where l.queue = 'full';
update queue.active_job aj set deadline = aj.deadline - interval '2701 years' where aj.lane = (select l.lane from queue.lane l where l.queue = 'full');
update queue.share_tag t set tag = t.tag - interval '2701 years' where t.queue = 'full';
select queue.configure_share('A', '{"weight": 2}');
select is_empty('select * from queue.check()', 'as each job has a tag');
select is(pg_temp.starts(4, 1, '{full}'), 'a1 b1 a2 b2', 'in turns');
select pg_temp.finish_all();
select queue.configure_share('A', '{"weight": null}');
select is_empty('select * from queue.check()', 'sound');
-- Nor can a share's tag pass the end.
select pg_temp.defer('a3', 'A', '{"queue": "full"}') \g /dev/null
select queue.tick() \g /dev/null
update queue.share_tag t set tag = timestamptz '0001-01-01Z' - interval '1 microsecond' where t.queue = 'full';
select pg_temp.defer('a4', 'A', '{"queue": "full"}') \g /dev/null
select max(t.tick) as tick from queue.share_tag t where t.queue = 'full' \gset
select queue.tick() \g /dev/null
select is((select max(t.tick) from queue.share_tag t where t.queue = 'full'), :tick::bigint, 'a tag at the end is not written again');
select is(pg_temp.starts(2, 1, '{full}'), 'a3 a4', 'and its jobs start');
select pg_temp.finish_all();

-- A ready job that meets a full key comes before the first that waits, and keeps that place when weights change.
\set key '{"concurrency": [{"key": "front", "limit": 1}]}'
select pg_temp.defer('lower', 'P', '{"queue": "lower"}') \g /dev/null
select queue.tick() \g /dev/null
select pg_temp.defer('a', 'P', '{"queue": "front"}', :'key') \g /dev/null
select queue.tick() \g /dev/null
select pg_temp.defer('b', 'P', '{"queue": "front"}', :'key') \g /dev/null
select queue.tick() \g /dev/null
select queue.defer('t', '{"name": "holds"}', queue => 'holder', options => :'key') \g /dev/null
select is(pg_temp.starts(1, 1, '{holder}'), 'holds', 'another queue takes the slot');
select is(pg_temp.starts(1, 1, '{front}'), null, 'so a ready job has to wait');
select is((select bool_and(w.deadline >= l.tag_base) from queue.waiting w join queue.lane l on l.lane = w.lane and l.queue = 'front'), true, 'all tags are of now');
select queue.configure_share('P', '{"weight": 3}');
select pg_temp.defer('c d', 'P', '{"queue": "front"}', :'key') \g /dev/null
select lives_ok('select queue.tick() from generate_series(1, 5)', 'the tags go on');
select is((select count(*) from queue.lane l where l.retag_from is not null), 0::bigint, 'all have new ones');
select is_empty('select * from queue.check()', 'sound');
create function pg_temp.in_turn(n integer) returns text language plpgsql as $$
declare
  v_names text[];
begin
  for i in 1 .. in_turn.n loop
    perform pg_temp.finish_all();
    v_names := v_names || pg_temp.starts(1, 1, '{front}');
  end loop;
  return array_to_string(v_names, ' ');
end $$;
select is(array(select n from regexp_split_to_table(pg_temp.in_turn(4), ' ') n order by n), '{a,b,c,d}', 'and each starts');
select queue.configure_share('P', '{"weight": null}');
-- A share whose tag can advance no further keeps it.
update queue.lane l set retag_from = l.tag_base + interval '1 day 1 microsecond' where l.queue = 'front';
select lives_ok($$select queue._tags(array[j.id], array[l.lane], array['infinity'::timestamptz]) from queue.job j join queue.lane l on l.queue = j.queue where j.queue = 'front'$$, 'four times');

-- Three long names that can't be compressed
select translate(encode(string_agg(sha256(n::text::bytea), ''::bytea order by n), 'base64'), E'\n', '') as long from generate_series(1, 64) n \gset
select pg_temp.defer('long1 long2 long3', substr(:'long', 1, 1000), jsonb_build_object('queue', substr(:'long', 1001, 900)), jsonb_build_object('concurrency', jsonb_build_array(jsonb_build_object('key', substr(:'long', 1901, 900), 'limit', 1)))) \g /dev/null
select is(pg_temp.starts(1, 1, array[substr(:'long', 1001, 900)]), 'long1', 'names as long as may be stop nobody');
select is((select count(*) from queue.share_tag t where octet_length(t.queue || t.key || t.share) > 2700), 1::bigint, 'though they meet in one row');
select * from finish();
