-- Jobs with several keys and shares, which change from the line of one key to that of another.

select plan(7);

set pgdefer.notify = off;
set statement_timeout = '20s';  -- a job that changes lines for ever is noticed

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

create function pg_temp.defer(keys text, delay interval default null) returns bigint language sql as $$
  select queue.defer('t', scheduled_at => clock_timestamp() + delay, options => jsonb_build_object('share', 's', 'concurrency', (
    select jsonb_agg(jsonb_build_object('key', left(k, 2), 'limit', 3, 'weight', right(k, 1)::integer))
    from unnest(string_to_array(keys, ' ')) k)))
$$;
create function pg_temp.key_waited_for(id bigint) returns text language sql as $$
  select w.key from queue.waiting w where w.id = key_waited_for.id
$$;

-- A heavy job waits for each of two keys, of which another job has one slot. A job with both keys comes back
-- with its kept tag, after a release.
select pg_temp.defer('K1:1') as one, pg_temp.defer('K2:1') as two \gset
select pg_temp.defer('K1:3', '1 hour') as heavy_one, pg_temp.defer('K2:3', '1 hour') as heavy_two \gset
select pg_temp.defer('K1:1 K2:1') as light \gset
select array_agg(f.claim order by f.id) as claims from queue.fetch(:worker, max_jobs => 3) f \gset
select queue.reschedule(:heavy_one, clock_timestamp()), queue.reschedule(:heavy_two, clock_timestamp()) \g /dev/null
select is(array[pg_temp.key_waited_for(:heavy_one), pg_temp.key_waited_for(:heavy_two)], '{kK1,kK2}', 'the heavy jobs wait');
select queue.release(:light, (:'claims'::bigint[])[3]) \g /dev/null
select queue.tick() \g /dev/null
select lives_ok($$select queue.pause('another')$$, 'a call that admits everything ends');
select is((select count(*) from queue.pending_settlement), 0::bigint, 'and leaves nothing for the next admission');
select is(pg_temp.key_waited_for(:light) is not null, true, 'the light job waits, behind a heavy one');
select queue.succeed(:one, (:'claims'::bigint[])[1]), queue.succeed(:two, (:'claims'::bigint[])[2]) \g /dev/null
select set_eq(format('select f.id from queue.fetch(%s, max_jobs => 3) f', :worker), array[:heavy_one, :heavy_two], 'when there is room, the heavy ones start');
select count(queue.succeed(j.id, j.claim)) from queue.jobs j where j.state = 'running' \g /dev/null
select results_eq(format('select f.id from queue.fetch(%s, max_jobs => 3) f', :worker), array[:light]::bigint[], 'and then the light one');
select is_empty('select * from queue.check()', 'all is sound');

select * from finish();
