-- Names of 1,000 bytes, the longest: each use has its number beside them.

select plan(13);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
\set name 'repeat(''é'', 500)'

select queue.defer('t') as id \gset
select claim from queue.fetch(:worker) \gset
select queue.finish_step(:id, :claim, :name, '1') \g /dev/null
select is((select finished from queue.begin_step(:id, :claim, :name)), false, 'a name of 1,000 bytes is used again');
select queue.finish_step(:id, :claim, :name, '2') \g /dev/null
select lives_ok(format('select queue.finish_step(%s, %s, %L, ''3'')', :id, :claim, :name || '#3'), 'a client may give the number itself');
select lives_ok(format('select queue.finish_steps(%s, %s, %L)', :id, :claim, jsonb_build_array(jsonb_build_object('name', :name || '#999999999'))), 'up to the greatest');
select is(test.refusal(format('select queue.finish_step(%s, %s, %L)', :id, :claim, n)), '22023', 'no longer name')
from unnest(array[:name || 'x#2', :name || '#1', :name || '#1000000000', repeat('#', 1001)]) n;
select results_eq('select octet_length(name), value from queue.steps order by finished_at', $$values (1000, '1'::jsonb), (1002, '2'), (1002, '3'), (1010, null)$$, 'the view shows all of them');
select is((select count(*) from queue.read_steps(:id, :claim, :name || '#2')), 2::bigint, 'so does a call that reads on after one');
select queue.wait(:id, :claim, :name || '#4', 's') \g /dev/null
select queue.tick() \g /dev/null
select is((select w.step from queue.waits_for(:id) w), :name || '#4', 'one may wait');
select queue.cancel(:id) \g /dev/null
select is((select error from queue.retry(array[:id], from_step => :name || '#3')), null, 'a job goes back to one');
select is((select steps -> (:name || '#2') from queue.fetch(:worker)), '2', 'and fetch returns those before it');
select is_empty('select * from queue.check()', 'all is sound');

select * from finish();
