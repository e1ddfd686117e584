-- Going back to a step, and the children that a job has awaited: only those that it awaits anew hold it.

select plan(25);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

\ir ../work/claim.helpers.psql

-- Lets a job await a child, by the steps children and ended.
create function pg_temp.beget(job bigint, claim bigint) returns void language plpgsql as $$
declare
  v_child bigint := queue.defer('child', options => jsonb_build_object('parent', job));
begin
  perform queue.finish_step(job, claim, 'children', jsonb_build_array(v_child));
  perform queue.await_jobs(job, claim, 'ended', array[v_child]);
end $$;

create function pg_temp.child(job bigint) returns bigint language sql as $$
  select (s.value ->> 0)::bigint from queue.steps s where s.job_id = job and s.name = 'children'
$$;

create function pg_temp.state(job bigint) returns text language sql as $$
  select queue.tick();
  select j.state from queue.jobs j where j.id = job
$$;

-- A cancelled job
select queue.defer('parent') as parent \gset
select pg_temp.beget(:parent, pg_temp.claim(:parent)) \g /dev/null
select pg_temp.child(:parent) as old \gset
select queue.cancel(:parent) \g /dev/null
select is((select outcome from queue.retry(array[:parent])), 'waiting', 'retried, a job waits for its child');
select queue.cancel(:parent) \g /dev/null
select is((select outcome from queue.retry(array[:parent], from_step => 'children')), 'ready', 'from the step that deferred it, it does not');
select is(pg_temp.state(:parent), 'ready', 'nor later');
select is_empty('select * from queue.check()', 'all is sound');
select pg_temp.claim(:parent) as claim \gset
select pg_temp.beget(:parent, :claim) \g /dev/null
select is(pg_temp.state(:parent), 'waiting', 'it waits for the new child');
select isnt(pg_temp.child(:parent), :old::bigint, 'which is another');
select queue.succeed(pg_temp.child(:parent), pg_temp.claim(pg_temp.child(:parent))) \g /dev/null
select is(pg_temp.state(:parent), 'ready', 'and for that one alone');
select queue.cancel(:old) \g /dev/null
select is(pg_temp.state(:parent), 'ready', 'whatever becomes of the old one');
select queue.retry(array[:old]) \g /dev/null
select is(pg_temp.state(:parent), 'ready', 'also if that is retried');
select is_empty('select * from queue.check()', 'all is sound');

-- From the wait itself: the same child is awaited anew.
select queue.cancel(:parent) \g /dev/null
select queue.retry(array[pg_temp.child(:parent)]) \g /dev/null
select is((select outcome from queue.retry(array[:parent], from_step => 'ended')), 'ready', 'from the wait it does not wait either');
select queue.await_jobs(:parent, pg_temp.claim(:parent), 'ended', array[pg_temp.child(:parent)]) \g /dev/null
select is(pg_temp.state(:parent), 'waiting', 'before it does so anew');
select queue.succeed(pg_temp.child(:parent), pg_temp.claim(pg_temp.child(:parent)), '7') \g /dev/null
select is(pg_temp.state(:parent), 'ready', 'the child ends');
select is((select n.result from queue.needs(:parent) n where n.need_id = pg_temp.child(:parent)), '7', 'with its new result');

-- With force, a running one; of several, each goes back to its own step
select pg_temp.claim(:parent) as claim \gset
select queue.retry(array[pg_temp.child(:parent)]) \g /dev/null
select queue.defer('parent') as other, queue.defer('plain') as plain \gset
select pg_temp.beget(:other, pg_temp.claim(:other)) \g /dev/null
select queue.cancel(:other) \g /dev/null
select results_eq(format('select id, outcome, error from queue.retry(array[%s, %s, %s], true, ''children'')', :parent, :other, :plain),
  format('values (%s::bigint, ''ready'', null), (%s, ''ready'', null), (%s, ''ready'', ''QJ009'')', :parent, :other, :plain), 'several jobs, of which one runs');
select is(pg_temp.state(:parent) || ' ' || pg_temp.state(:other), 'ready ready', 'wait for nothing');

-- Forks, and forks of forks, while the child runs again
select queue.finish_step(:other, pg_temp.claim(:other), 'children', to_jsonb(array[:old])) \g /dev/null
select queue.defer('parent') as origin \gset
select pg_temp.beget(:origin, pg_temp.claim(:origin)) \g /dev/null
select pg_temp.child(:origin) as child \gset
select queue.succeed(:child, pg_temp.claim(:child), '1') \g /dev/null
select queue.await_jobs(:origin, pg_temp.claim(:origin), 'ended#2', array[:old]) \g /dev/null
select queue.cancel(:old) \g /dev/null
select queue.finish_step(:origin, pg_temp.claim(:origin), 'after') \g /dev/null
select queue.fork(:origin, 'after') as fork \gset
select queue.retry(array[:child]) \g /dev/null
select queue.fork(:fork, 'ended') as second \gset
select is(pg_temp.state(:fork) || ' ' || pg_temp.state(:second), 'ready ready', 'a fork waits for no child, and a fork of it neither');
select queue.fork(:fork, 'ended') as third, queue.fork(:second, 'children') as fourth \gset
select is(pg_temp.state(:third) || ' ' || pg_temp.state(:fourth), 'ready ready', 'nor later ones');
select is((select string_agg(n.state, ' ') from queue.needs(:third) n), 'cancelled ready', 'the job sees that the child has not ended');
select queue.await_jobs(:third, pg_temp.claim(:third), 'ended', array[:child]) \g /dev/null
select is(pg_temp.state(:third), 'waiting', 'a fork that awaits it waits');
select queue.succeed(:child, pg_temp.claim(:child), '2') \g /dev/null
select is(pg_temp.state(:third), 'ready', 'until it has ended');
select is_empty('select * from queue.check()', 'all is sound');

-- Steps that stay: the job waits for what they have awaited, if that runs again.
select queue.defer('parent') as parent \gset
select pg_temp.beget(:parent, pg_temp.claim(:parent)) \g /dev/null
select pg_temp.child(:parent) as child \gset
select queue.succeed(:child, pg_temp.claim(:child), '1') \g /dev/null
select queue.finish_step(:parent, pg_temp.claim(:parent), 'after') \g /dev/null
select queue.await_jobs(:parent, (select claim from queue.jobs where id = :parent), 'twice', array[:child]) \g /dev/null
select pg_temp.claim(:parent) as claim \gset
select queue.fail(:parent, :claim, 'no', null, '{"retryable": false}') \g /dev/null
select queue.retry(array[:child]) \g /dev/null
select is((select outcome from queue.retry(array[:parent], from_step => 'after')), 'waiting', 'a job waits again for the child that an earlier step has awaited');
select queue.succeed(:child, pg_temp.claim(:child), '2') \g /dev/null
select is(pg_temp.state(:parent), 'ready', 'until it has ended');
select is_empty('select * from queue.check()', 'all is sound');

select * from finish();
