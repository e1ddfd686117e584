-- Progress: set by the current claim, shown while the job runs and after it.

select plan(7);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset
select queue.defer('t') as id \gset
select claim from queue.fetch(:worker) \gset

select is(test.refusal(format('select queue.set_progress(%s, %s, 50)', :id, :claim - 1)), 'QJ002', 'not by an old claim');
select is(test.refusal(format('select queue.set_progress(%s, %s, 101)', :id, :claim)), '22023', 'more than all');
select is(test.refusal(format('select queue.set_progress(%s, %s, ''NaN'')', :id, :claim)), '22023', 'or not a number');

select queue.set_progress(:id, :claim, 33.3333, 'reading') \g /dev/null
select results_eq(format('select percent, message from queue.jobs where id = %s', :id), 'values (33.33, ''reading''::text)', 'how far it has come');
select queue.set_progress(:id, :claim, 50) \g /dev/null
select results_eq(format('select percent, message from queue.jobs where id = %s', :id), 'values (50::numeric, ''reading''::text)', 'a message stays');
select queue.set_progress(:id, :claim, 100.004) \g /dev/null
select is((select percent from queue.jobs where id = :id), 100::numeric, 'it is rounded first');
select queue.succeed(:id, :claim) \g /dev/null
select is((select percent from queue.jobs where id = :id), 100::numeric, 'a finished job keeps it');

select * from finish();
