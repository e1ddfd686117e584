-- Streams: appended in order by the current claim, read while the job runs and after it.

select plan(23);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

select queue.defer('t') as id \gset
select claim from queue.fetch(:worker) \gset
select is(queue.emit(:id, :claim, 'log', '"one"'), 1::bigint, 'the first of a stream');
select is(queue.emit(:id, :claim, 'log', '{"two": 2}'), 2::bigint, 'the next');
select is(queue.emit(:id, :claim, 'tokens', null), 1::bigint, 'each stream counts for itself');
begin;
select queue.emit(:id, :claim, 'log', '"rolled back"') \g /dev/null
rollback;
select is(queue.emit(:id, :claim, 'log', '"three"'), 3::bigint, 'without gaps');
select results_eq(format('select no, value, emitted_at <= clock_timestamp() from queue.read_stream(%s, ''log'')', :id),
                  'values (1::bigint, ''"one"''::jsonb, true), (2, ''{"two": 2}'', true), (3, ''"three"'', true)', 'read in order');
select results_eq(format('select no, value from queue.read_stream(%s, ''log'', 2)', :id), 'values (3::bigint, ''"three"''::jsonb)', 'after a number');
select is_empty(format('select * from queue.read_stream(%s, ''log'', 3)', :id), 'there is no more');
select is_empty(format('select * from queue.read_stream(%s, ''none'')', :id), 'nor in a stream that does not exist');
select results_eq(format('select value from queue.read_stream(%s, ''tokens'')', :id), 'values (''null''::jsonb)', 'NULL is null');

select results_eq(format('select stream, items, last_at <= clock_timestamp() from queue.streams(%s)', :id), 'values (''log'', 3::bigint, true), (''tokens'', 1, true)',
                  'a list of its streams');
select queue.defer('other') as other \gset
select is_empty(format('select * from queue.streams(%s)', :other), 'a job without any');

-- As many as fit into one answer
insert into queue.stream_item (job_id, stream, no, value) select :id, 'many', n, '1' from generate_series(1, 1001) n;
select is((select max(no) from queue.read_stream(:id, 'many')), 1000::bigint, 'at most a thousand');
select queue.emit(:id, :claim, 'large', to_jsonb(string_agg(md5(n::text || i), ''))) from generate_series(1, 3) n, generate_series(1, 12500) i group by n \g /dev/null
select is((select max(no) from queue.read_stream(:id, 'large')), 2::bigint, 'and at most 1 MB');
select is((select max(no) from queue.read_stream(:id, 'large', 2)), 3::bigint, 'the rest after that');

-- Waiting clients are notified
select channel from queue.await_result(:id) \gset
select is((select count(*) from queue.awaited), 1::bigint, 'somebody waits');
select queue.emit(:id, :claim, 'log', '"four"') \g /dev/null
select is((select count(*) from queue.awaited), 0::bigint, 'and is told');

-- Refusals
select is(test.refusal(format(call, :id, :claim - 1)), 'QJ002', format(call, 'id', 'an old claim'))
from (values ('select queue.emit(%s, %s, ''log'', ''1'')')) v (call);
select is(test.refusal(format('select queue.emit(%s, %s, '''', ''1'')', :id, :claim)), '22023', 'a stream without a name');
select is(test.refusal('select * from queue.read_stream(999999, ''log'')'), 'QJ001', 'a stream of no job');
select is(test.refusal('select * from queue.streams(999999)'), 'QJ001', 'nor its list');

-- The end
select queue.succeed(:id, :claim) \g /dev/null
select is((select count(*) from queue.read_stream(:id, 'log')), 4::bigint, 'a finished job keeps its streams');
select is((select outcome from queue.delete(array[:id])), 'deleted', 'deleted');
select is((select count(*) from queue.stream_item), 0::bigint, 'it leaves none');

select * from finish();
