-- next: a job that is claimed by hand.

select plan(17);

\ir change.helpers.psql

set pgdefer.notify = off;

select queue.defer('n', '{"n": 1}', queue => 'next') as a, queue.defer('n', queue => 'next', priority => 1) as b, queue.defer('n', queue => 'next') as c \gset
select is((select count(*)::integer from queue.workers where name = 'operator'), 0, 'no worker so far');
select results_eq('select id, task, queue, priority, attempt, expires_at - now() between ''19 min'' and ''21 min'' from queue.next(''{next}'')', format('values (%s::bigint, ''n'', ''next'', 1, 1, true)', :b), 'the next job, with a lease');
select claim from queue.jobs where id = :b \gset
select is(pg_temp.job(:b), 'running 1 0 0 1', 'runs');
select queue.tick(), queue.reap() \g /dev/null
select is(pg_temp.job(:b), 'running 1 0 0 1', 'as long as its lease');
select is(queue.fail(:b, :claim, 'by hand'), 'failed', 'and ends by its claim');
select results_eq('select id, args, expires_at from queue.next(''{nex*}'', ack => true)', format('values (%s::bigint, ''{"n": 1}''::jsonb, null::timestamptz)', :a), 'with ack');
select is(pg_temp.job(:a), 'succeeded operator 1 0 0 1', 'it is done with');
select id from queue.next('{next}', lease => '1 second') \gset
select is(:id::bigint, :c::bigint, 'the last');
select is_empty('select * from queue.next(''{next}'')', 'and no more');
select is_empty('select * from queue.next(''{next}'', true)', 'with ack neither');
update queue.lease set expires_at = now() - interval '1 second' where queue.lease.id = :c;
select queue.reap() \g /dev/null
select is(pg_temp.job(:c), 'ready 1 0 1 1', 'past its lease it has crashed');
select is((select id from queue.next('{next}')), :c::bigint, 'and comes again');
select queue.done(array[:c]) \g /dev/null
select is(test.refusal('select queue.next(' || arguments || ')'), '22023', 'next(' || arguments || ')') from (values ('''{}'''), ('array['''']'), ('''{nil}'', lease => null'), ('''{nil}'', lease => ''0''')) v (arguments);
select is_empty('select * from queue.check()', 'in order');

select * from finish();
