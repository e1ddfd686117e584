-- Queues: creating, configuring.

select plan(20);

\ir queues.helpers.psql

select is(queue.create_queue('made'), true, 'a new queue');
select is(queue.create_queue('made'), false, 'is made once');
select is(queue.create_queue('born paused', paused => true), true, 'paused from the start');
select queue.defer('a', queue => 'born paused'), queue.defer('b', queue => 'made') \g /dev/null
select is(pg_temp.run(), 'b', 'it gives nothing');
select is((select j.state || ' ' || j.reason from queue.jobs j where j.task = 'a'), 'ready paused', 'its job keeps its state, with a reason');
select matches(queue.why((select j.id from queue.jobs j where j.task = 'a')), 'its queue born paused is paused', 'why says so');
select is(queue.resume('born paused'), 1, 'resume counts the jobs');
select is(pg_temp.run(), 'a', 'and they go');

-- Bad arguments change nothing.
select is((select string_agg(distinct test.refusal(c), ', ') from unnest(array[
  $$select queue.configure_queue('q', '{"max_running": 0}')$$, $$select queue.configure_queue('q', '{"rate": {"limit": 1}}')$$,
  $$select queue.configure_queue('q', '{"rate": {"limit": "5", "per": "1 s"}}')$$,
  $$select queue.configure_queue('q', '{"rate": 5}')$$, $$select queue.configure_queue('q', '{"nonsense": 1}')$$, $$select queue.configure_queue('q*', '{}')$$,
  $$select queue.configure_queue('', '{}')$$, $$select queue.configure_queue('q', '{"retain": "x"}')$$, $$select queue.configure_queue('q', '{"paused": 1}')$$,
  $$select queue.create_queue('x*')$$, $$select queue.create_queue(null)$$, $$select queue.pause('')$$, $$select queue.pause(task => '')$$]) c), '22023', 'bad arguments');
select is((select count(*) from queue.queues q where q.name = 'q'), 0::bigint, 'which change nothing');
select queue.configure_queue('names "of" any kind ☃', '{"max_running": 5, "paused": true, "retain": "1 day"}');
select is((select row (q.max_running, q.retain)::text from queue.queues q where q.name = 'names "of" any kind ☃'), '(5,"1 day")', 'a name of any characters');
select queue.configure_queue('names "of" any kind ☃', '{"paused": false}');
select is((select row (q.max_running, q.retain)::text from queue.queues q where q.name = 'names "of" any kind ☃'), '(5,"1 day")', 'absent keys keep their value');

select queue.defer('c', queue => 'new') from generate_series(1, 3) \g /dev/null
select queue.defer('c', queue => 'new', options => '{"delay": "1 hour"}'), queue.defer('c', queue => 'new', options => '{"held": true}'), queue.defer('c', queue => 'new', needs => array[(select max(j.id) from queue.jobs j)]) \g /dev/null
select is((select row (q.ready, q.running)::text from queue.queues q where q.name = 'new'), '(3,0)', 'new jobs count as ready, except those that wait');
select queue.tick() \g /dev/null
select is((select row (q.ready, q.running)::text from queue.queues q where q.name = 'new'), '(3,0)', 'and no more once they are admitted');

select queue.pause('typo') \g /dev/null
select is((select q.paused_until from queue.queues q where q.name = 'typo'), 'infinity'::timestamptz, 'a queue that is only paused is shown');
select queue.resume('typo') \g /dev/null
select is_empty('select from queue.queues q where q.name = ''typo'' ', 'until it is resumed');

-- Jobs that were moved, and claimed as the slot of their key was passed on: they count in their new queue.
select queue.register_worker('passes', info => '{"dead_after": "1 day"}') as worker \gset
select array_agg(queue.defer('k', queue => 'from', concurrency_key => 'K', concurrency_limit => 1)) as ids from generate_series(1, 3) \gset
select id, claim from queue.fetch(:worker, array['from']) \gset
select queue.move((:'ids'::bigint[])[2:], 'to') \g /dev/null
select id as moved, claim as moved_claim from queue.finish_and_fetch(:worker, jsonb_build_array(jsonb_build_object('id', :id, 'claim', :claim, 'outcome', 'succeeded')), array['to'], 1) \gset
select is((select string_agg(q.name || ' ' || q.running, ', ' order by q.name) from queue.queues q where q.name in ('from', 'to')), 'from 0, to 1', 'a moved job runs in its new queue');
select queue.configure_queue('from', '{"max_running": 1}'), queue.configure_queue('to', '{"max_running": 1}');
select queue.succeed(:moved, :moved_claim) \g /dev/null
select queue.defer('k', queue => 'from'), queue.tick() \g /dev/null
select is((select count(*) from queue.fetch(:worker, array['from'], 5)), 1::bigint, 'its old queue has room');
select is((select count(*) from queue.fetch(:worker, array['to'], 5)), 1::bigint, 'and its new one has as much as it is given');

select is_empty('select * from queue.check()', 'sound');

select * from finish();
