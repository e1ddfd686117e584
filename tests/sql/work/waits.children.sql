-- The children of a job that goes on with steps stay until it has ended; those that are gone count as ended.

select plan(25);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

\ir claim.helpers.psql

-- Defers children in a step of a job, as a client does, and ends them.
create function pg_temp.beget(job bigint, claim bigint, tasks text[]) returns bigint[] language plpgsql as $$
declare
  v_ids bigint[];
begin
  v_ids := array(select queue.defer(t, options => jsonb_build_object('parent', job, 'retain', '0 s')) from unnest(tasks) t);
  perform queue.finish_step(job, claim, 'children', to_jsonb(v_ids));
  return v_ids;
end $$;

create function pg_temp.finish(ids bigint[]) returns void language plpgsql as $$
begin
  perform queue.succeed(u.id, pg_temp.claim(u.id), to_jsonb(u.id)) from unnest(ids) u (id);
end $$;

-- Children that end, and whose retention passes, before their parent awaits them
select queue.defer('parent') as parent \gset
select pg_temp.claim(:parent) as claim \gset
select pg_temp.beget(:parent, :claim, '{one,two}') as children \gset
select pg_temp.finish(:'children') \g /dev/null
select is(queue.prune(), 0, 'children are kept, because their parent has not ended');
select is((select pruned from queue.tick()), 0, 'tick keeps them too');
select is(queue.prune(state => 'succeeded'), 0, 'also if an operator asks for their state');
select lives_ok(format('select queue.await_jobs(%s, %s, ''ended'', %L)', :parent, :claim, :'children'), 'so it can await them');
select pg_temp.claim(:parent) as claim \gset
select is((select array_agg(n.result order by n.need_id) from queue.needs(:parent) n), array(select to_jsonb(c) from unnest((:'children')::bigint[]) c), 'and finds their results');
select is(queue.prune(), 0, 'they stay while it runs');
select queue.succeed(:parent, :claim) \g /dev/null
select is(queue.prune(), 2, 'and go when it has ended');

-- A parent without steps keeps them only while it runs; one that is gone keeps none.
select queue.defer('plain') as plain \gset
select pg_temp.claim(:plain) as claim \gset
select queue.defer('child', options => format('{"parent": %s, "retain": "0 s"}', :plain)::jsonb) as child \gset
select pg_temp.finish(array[:child]) \g /dev/null
select is(queue.prune(), 0, 'a parent may be in its first step while it runs');
select queue.release(:plain, :claim) \g /dev/null
select is(queue.prune(), 1, 'without steps it keeps no children then');
select pg_temp.claim(:plain) as claim \gset
select queue.finish_step(:plain, :claim, 'a') \g /dev/null
select queue.defer('child', options => format('{"parent": %s, "retain": "0 s"}', :plain)::jsonb) as child \gset
select queue.delete(array[:plain], true) \g /dev/null
select pg_temp.finish(array[:child]) \g /dev/null
select is(queue.prune(), 1, 'one that was deleted keeps none');

-- Children that are gone: an operator deleted them, or the parent had ended meanwhile.
select queue.defer('parent') as parent \gset
select pg_temp.claim(:parent) as claim \gset
select pg_temp.beget(:parent, :claim, '{gone,stays,"gone too"}') as children \gset
select ((:'children')::bigint[])[2] as stays, array[((:'children')::bigint[])[1], ((:'children')::bigint[])[3]] as gone \gset
select pg_temp.finish(:'children') \g /dev/null
select is((select string_agg(d.outcome, ' ') from queue.delete(:'gone') d), 'deleted deleted', 'an operator may delete them before they are awaited');
select is(test.refusal(format('select queue.await_jobs(%s, %s, ''ended'', array[999999]::bigint[] || %L)', :parent, :claim, :'children')), 'QJ001', 'a job that no step names is refused');
select is(test.refusal(format('select queue.await_jobs(%s, %s, ''ended'', array[0]::bigint[] || %L)', :parent, :claim, :'gone')), 'QJ001', 'and any other id');
select lives_ok(format('select queue.await_jobs(%s, %s, ''ended'', %L)', :parent, :claim, :'children'), 'those that a step names have ended');
select pg_temp.claim(:parent) as claim \gset
select results_eq(format('select n.need_id, n.state from queue.needs(%s) n', :parent),
  format('select u.id, case u.id when %s then ''succeeded'' else ''deleted'' end from unnest(%L::bigint[]) u (id) order by 1', :stays, :'children'), 'the job sees which are gone');
select queue.fail(:parent, :claim, 'no', null, '{"retryable": false}') \g /dev/null
select is(queue.prune(), 1, 'a failed parent keeps none');
select is((select outcome from queue.retry(array[:parent])), 'ready', 'retried, it continues without them');
select pg_temp.claim(:parent) as claim \gset
select lives_ok(format('select queue.await_jobs(%s, %s, ''again'', array[%s])', :parent, :claim, :stays), 'and may await them again');
select pg_temp.claim(:parent) as claim \gset
select is((select count(*) from queue.needs(:parent) n where n.state = 'deleted'), 3::bigint, 'though all are gone');

-- Steps with values of other kinds name no job.
select queue.finish_step(:parent, :claim, v.name, v.value) from (values ('n', '7777'::jsonb), ('s', '["8888", null, 1e300, 9999.5, [6666]]'), ('o', '{"a": 5555}')) v (name, value) \g /dev/null
select is(test.refusal(format('select queue.await_jobs(%s, %s, ''x'', array[%s])', :parent, :claim, v.id)), 'QJ001', v.id || ' is no child') from (values (8888), (6666)) v (id);
select queue.fail(:parent, :claim, 'no', null, '{"retryable": false}') \g /dev/null
select is((select outcome from queue.retry(array[:parent], from_step => 'children')), 'ready', 'a parent goes back to before it had children');
select pg_temp.claim(:parent) as claim \gset
select lives_ok(format('select queue.await_jobs(%s, %s, ''ended'', %L)', :parent, :claim, :'gone'), 'it may await those that it awaited before, though no step names them');
select queue.succeed(:parent, pg_temp.claim(:parent)) \g /dev/null
select is(queue.prune(state => 'succeeded'), 2, 'jobs that have ended go');
select is_empty('select * from queue.check()', 'all is sound');

select * from finish();
