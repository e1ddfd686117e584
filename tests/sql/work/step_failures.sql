-- Failures of steps: their own retry policies, and what a handler sees when a step has failed for good.

select plan(90);

select queue.register_worker('w', info => '{"dead_after": "1 day"}') as worker \gset

-- State, reason, attempts, failures, claims, progress.
create function pg_temp.job(id bigint) returns text language sql as $$
  select concat_ws(' ', j.state, j.reason, j.attempts, j.failures, j.claims, j.progress) from queue.jobs j where j.id = job.id
$$;

-- Lets an hour pass for everything that waits for a time.
create function pg_temp.pass() returns void language sql as $$
  update queue.waiting set at = at - interval '1 hour';
  update queue.job_override set scheduled_at = scheduled_at - interval '1 hour' where isfinite(scheduled_at);
  update queue.cursor set due_at = '-infinity';
$$;

\set policy '{"retry": {"max_attempts": 3, "base": "30 minutes"}}'
\set note '{"__pgdefer__": "step_failed", "value": "no money"}'

-- Two failures, then success
select queue.defer('t', lock => 'l') as id, queue.defer('t', lock => 'l') as behind \gset
select claim from queue.fetch(:worker) \gset
select is(queue.fail_step(:id, :claim, 'charge', 'no money', '{"a": 1}', :'policy'), 'scheduled', 'a step fails: its job runs again later');
select is(pg_temp.job(:id), 'scheduled 1 0 1 0', 'which is neither a failure of the job nor progress');
select is(test.refusal(format('select queue.succeed(%s, %s)', :id, :claim)), 'QJ002', 'the claim has ended');
select results_eq('select outcome, error, details from queue.attempts', $$values ('failed', 'no money', '{"a": 1}'::jsonb)$$, 'the attempt has failed');
select is((select error from queue.jobs where id = :id), 'no money', 'its error is that of the job');
select alike(queue.why(:id), 'its time has not come: %; its step charge has failed once: no money', 'why names the step');
select is_empty(format('select * from queue.fetch(%s)', :worker), 'the job keeps its turn at the lock');
select is_empty('select * from queue.steps', 'the step is not finished');
select is_empty('select * from queue.check()', 'all is sound');
select ok((select scheduled_at between now() + interval '29 minutes' and now() + interval '31 minutes' from queue.jobs where id = :id), 'the policy of the step says when');
select pg_temp.pass() \g /dev/null
select claim, attempt, steps is null as none from queue.fetch(:worker) \gset
select is(:attempt, 2, 'it runs again');
select ok(:'none', 'without finished steps');
select is((select finished from queue.begin_step(:id, :claim, 'charge')), false, 'begin_step says so too');
select queue.finish_step(:id, :claim, 'before', '1') \g /dev/null
select is(queue.fail_step(:id, :claim, 'charge', 'again', null, :'policy'), 'scheduled', 'a second failure');
select alike(queue.why(:id), '%; its step charge has failed 2 times: again', 'is counted');
select is((select outcome from queue.retry(array[:id])), 'ready', 'a manual retry');
select claim from queue.fetch(:worker) \gset
select is(queue.fail_step(:id, :claim, 'charge', 'once more', null, :'policy'), 'scheduled', 'counts anew');
select alike(queue.why(:id), '%; its step charge has failed once: once more', 'from one');
select pg_temp.pass() \g /dev/null
select claim from queue.fetch(:worker) \gset
select queue.finish_step(:id, :claim, 'charge', '5') \g /dev/null
select results_eq('select name, value, failures, error from queue.steps order by name', $$values ('before', '1'::jsonb, 0, null), ('charge', '5', 1, null::text)$$, 'it succeeds');
select queue.succeed(:id, :claim) \g /dev/null

-- For good
select id, claim from queue.fetch(:worker) \gset
select is(:id, :behind, 'the next at the lock');
select queue.finish_step(:id, :claim, 'a') \g /dev/null
select is(queue.fail_step(:id, :claim, 'charge', 'no money'), null, 'without a policy the first failure is the last');
select is((select claim from queue.jobs where id = :id), :claim::bigint, 'the claim goes on');
select results_eq($$select value, failures, error from queue.steps where name = 'charge' and error is not null$$, format($$values (%L::jsonb, 1, 'no money')$$, :'note'), 'the step is finished, by its error');
select queue.begin_step(:id, :claim, 'charge') \g /dev/null
select is(queue.fail_step(:id, :claim, 'charge', 'other use', null, '{"retry": {"max_attempts": 2}}'), 'ready', 'another use of the name fails apart');
select claim, steps -> 'charge' as charge, steps ? 'charge#2' as other from queue.fetch(:worker) \gset
select is(:'charge'::jsonb, :'note'::jsonb, 'later runs find the failed step');
select results_eq(format('select * from queue.begin_step(%s, %s, ''charge'')', :id, :claim), format('values (true, %L::jsonb)', :'note'), 'begin_step returns that');
select is(test.refusal(format('select queue.fail_step(%s, %s, ''a'', ''x'')', :id, :claim)), 'QJ003', 'a step that is finished can''t fail');
select ok(not :'other', 'but not the one that is tried again');
select is(queue.fail_step(:id, :claim, 'charge#2', 'other use', null, '{"retry": {"max_attempts": 2}}'), null, 'whose last attempt fails');
select is(queue.fail(:id, :claim, 'charge failed'), 'failed', 'the handler gives up');
select is((select outcome from queue.retry(array[:id])), 'ready', 'an operator retries it');
select claim, steps from queue.fetch(:worker) \gset
select is(:'steps'::jsonb, format('{"a": null, "charge": %s}', :'note')::jsonb, 'the step that had failed last runs again, others do not');
select queue.finish_step(:id, :claim, 'charge#2', '2') \g /dev/null
select is((select error from queue.steps where name = 'charge#2'), null, 'and succeeds');
select queue.succeed(:id, :claim) \g /dev/null
select queue.fork(:id, 'charge#2') as copy \gset
select is((select error from queue.steps where job_id = :copy and name = 'charge'), 'no money', 'a copy has the failed step');
select is((select outcome from queue.retry(array[:id], from_step => 'charge')), 'ready', 'from a step that has failed');
select queue.cancel(id) from queue.jobs where state = 'ready' and id <> :id \g /dev/null
select claim, steps from queue.fetch(:worker) \gset
select is(:'steps'::jsonb, '{"a": null}', 'it runs again too');

-- The options
select is(queue.fail_step(:id, :claim, 'x', 'e', null, '{"retry": {"max_attempts": 3}, "retryable": false}'), null, 'not retryable');
select is(queue.fail_step(:id, :claim, 'y', 'e', null, '{"retryable": true}'), 'ready', 'retryable without a policy');
select claim from queue.fetch(:worker) \gset
select is(queue.fail_step(:id, :claim, 'y', 'e', null, '{"retry": {"max_attempts": null}, "retry_in": "1 hour", "outcome": "timed_out"}'), 'scheduled', 'without a limit, after an hour');
select is((select outcome from queue.attempts where job_id = :id order by claim desc limit 1), 'timed_out', 'it had timed out');
select queue.reschedule(:id) \g /dev/null
select claim from queue.fetch(:worker) \gset
select is(queue.fail_step(:id, :claim, 'y', 'e', null, '{"retry": {"max_attempts": null, "base": "1 hour"}, "deadline_in": "59 minutes"}'), null, 'no try that would begin after the deadline');
select is((select failures from queue.steps where name = 'y'), 3, 'the third failure');
select is(queue.fail_step(:id, :claim, 'z', 'e', null, format('{"retry": {"base": "1 hour"}, "deadline": %s}', to_json(now() + interval '59 minutes'))::jsonb), null, 'nor after a time');
select is(queue.fail_step(:id, :claim, 'z#2', 'e', null, format('{"retry": {"base": "1 hour"}, "deadline": %s}', to_json(now() + interval '2 hours'))::jsonb), 'scheduled', 'before it');
select queue.reschedule(:id) \g /dev/null
select claim from queue.fetch(:worker) \gset
select is(queue.fail_step(:id, :claim, 'z#2', 'e', null, '{"retry": {"base": "1 hour"}, "deadline_in": "90 minutes", "fingerprint": "v1"}'), 'scheduled', 'in time');
update queue.step set failed_at = failed_at - interval '40 minutes' where name = 'z' and no = 2;
select queue.reschedule(:id) \g /dev/null
select claim from queue.fetch(:worker) \gset
select is(queue.fail_step(:id, :claim, 'z#2', 'e', null, '{"retry": {"base": "1 hour"}, "deadline_in": "90 minutes"}'), null, 'the interval begins with the first failure');
select is(test.refusal(format('select queue.begin_step(%s, %s, ''z#2'', ''v2'')', :id, :claim)), 'QJ009', 'with the fingerprint of the step');
select queue.finish_steps(:id, :claim, '[{"name": "w"}]') \g /dev/null
select is(queue.fail_step(:id, :claim, 'listed', 'e', null, '{"retryable": true}'), 'ready', 'a step fails');
select claim from queue.fetch(:worker) \gset
select queue.finish_steps(:id, :claim, '[{"name": "listed", "value": 1}]') \g /dev/null
select is((select concat_ws(' ', value, failures, error) from queue.steps where name = 'listed'), '1 1', 'and succeeds in a list');

-- Refusals, which change nothing
select is(test.refusal(format('select queue.fail_step(%s, %s, ''r'', ''e'', null, %L)', :id, :claim, options)), '22023', 'refused: ' || options)
from unnest(array['{"retry": {"max_attempts": 0}}', '{"retry": 3}', '{"deadline": "now or never"}', '{"deadline": "-infinity"}', '{"deadline_in": "x"}', '{"deadline": "2030-01-01", "deadline_in": "1 s"}', '{"fingerprint": 5}', '{"queue": "q"}', '{"outcome": "crashed"}']) options;
select is(test.refusal(format('select queue.fail_step(%s, %s, ''r'', ''e'')', :id, :claim - 1)), 'QJ002', 'an old claim');
select is_empty($$select from queue.step where name = 'r'$$, 'none is stored');

-- From the step that has failed last
select is(queue.fail_step(:id, :claim, 'last', 'e'), null, 'the last step fails for good');
select queue.fail(:id, :claim, 'e', null, '{"retryable": false}') \g /dev/null
select is((select outcome from queue.retry(array[:id], from_step => 'last')), 'ready', 'from that step');
select claim, steps ? 'listed' and not steps ? 'last' as kept from queue.fetch(:worker) \gset
select ok(:'kept', 'those before it in its run are kept');

select queue.sleep(:id, :claim, 'nap', now() + interval '1 hour') \g /dev/null
select alike(queue.why(:id), 'its time has not come: %; it sleeps at its step nap', 'a job sleeps after a step that has failed for good');
select queue.reschedule(:id), queue.reschedule(:id, '2999-01-01') \g /dev/null
select unalike(queue.why(:id), '%its step%', 'why names no such step');
select queue.reschedule(:id) \g /dev/null
select claim from queue.fetch(:worker) \gset

-- A handler that has gone on, in the same run
select is(queue.fail_step(:id, :claim, 'left', 'e'), null, 'a step fails for good');
select queue.finish_step(:id, :claim, 'instead') \g /dev/null
select is(queue.fail_step(:id, :claim, 'u', 'e', null, '{"retryable": true}'), 'ready', 'another is to be tried again');
select claim from queue.fetch(:worker) \gset
select queue.finish_step(:id, :claim, 'inserted') \g /dev/null
select queue.fail(:id, :claim, 'e', null, '{"retryable": false}') \g /dev/null
select queue.retry(array[:id]) \g /dev/null
select claim, steps ?& '{left,instead,inserted}' as kept from queue.fetch(:worker) \gset
select ok(:'kept', 'a manual retry does not go back to the first');
select is(queue.fail_step(:id, :claim, 'u', 'e', null, '{"retry": {"max_attempts": 2}}'), 'ready', 'and counts anew for the second');
select claim from queue.fetch(:worker) \gset
select queue.fail_step(:id, :claim, 'left#2', 'e'), queue.finish_step(:id, :claim, 'instead#2') \g /dev/null
select queue.fail(:id, :claim, 'e', null, '{"retryable": false}') \g /dev/null
select queue.retry(array[:id]) \g /dev/null
select claim, steps ? 'left#2' as kept from queue.fetch(:worker) \gset
select ok(:'kept', 'nor to one before a step of the same run');

-- Uses of a name that run at once, counted by the client: the second has finished when the first ends
select queue.cancel(id) from queue.jobs where state in ('ready', 'scheduled') \g /dev/null
select queue.defer('t') as two \gset
select claim as claim2 from queue.fetch(:worker) \gset
select queue.finish_step(:two, :claim2, 'at once#2', '2'), queue.finish_step(:two, :claim2, 'nap#2') \g /dev/null
select is(queue.fail_step(:two, :claim2, 'at once', 'e', null, '{"retry": {"max_attempts": 2}}'), 'ready', 'the first use fails after the second has finished');
select claim as claim2 from queue.fetch(:worker) \gset
select is(queue.fail_step(:two, :claim2, 'at once', 'e', null, '{"retry": {"max_attempts": 2}}'), null, 'and again in the next run');
select results_eq(format('select name, failures from queue.steps where job_id = %s and name like ''at once%%'' order by 1', :two), $$values ('at once', 2), ('at once#2', 0)$$, 'the first has failed, not the second');
select lives_ok(format('select queue.sleep(%s, %s, ''nap'', now())', :two, :claim2), 'a sleep is the first use too');
select queue.cancel(:two) \g /dev/null

-- A call that is repeated, because its answer was lost
select queue.defer('t') as again \gset
select claim as claim3 from queue.fetch(:worker, options => format('{"ids": [%s]}', :again)::jsonb) \gset
select is(queue.fail_step(:again, :claim3, 'lost', v.error), null, v.about)
from (values ('first', 'a step fails for good'), ('second', 'the same call counts for no other use'), ('third', 'however often it comes')) v (error, about);
select results_eq(format('select name, failures, error from queue.steps where job_id = %s', :again), $$values ('lost', 1, 'first')$$, 'the first one stands');
select is((select concat_ws(' ', b.finished, b.value ->> 'value') from queue.begin_step(:again, :claim3, 'lost') b), 'f', 'the next use of the name is begun');
select is(queue.fail_step(:again, :claim3, 'lost', 'other'), null, 'it fails too');
select is(queue.fail_step(:again, :claim3, 'lost', 'other'), null, 'and its call may be repeated');
select is(queue.fail_step(:again, :claim3, 'lost#2', 'other'), null, 'with its number too');
select results_eq(format('select name, failures, error from queue.steps where job_id = %s order by name', :again), $$values ('lost', 1, 'first'), ('lost#2', 1, 'other')$$, 'without another use');
select queue.finish_step(:again, :claim3, 'done') \g /dev/null
select is(test.refusal(format('select queue.fail_step(%s, %s, ''done'', ''e'')', :again, :claim3)), 'QJ003', 'a step that has succeeded does not fail');
select queue.begin_step(:again, :claim3, 'done') \g /dev/null
select queue.fail_step(:again, :claim3, 'done', 'e') \g /dev/null
select is((select value from queue.steps where job_id = :again and name = 'done'), null, 'nor does it change when its next use fails');
select is(queue.fail_step(:again, :claim3, 'later', 'e', null, :'policy'), 'scheduled', 'a step is to be tried again');
select is(test.refusal(format('select queue.fail_step(%s, %s, ''later'', ''e'')', :again, :claim3)), 'QJ002', 'then the repeated call has lost its claim');
select queue.reschedule(:again, now()) \g /dev/null
select claim as claim3 from queue.fetch(:worker, options => format('{"ids": [%s]}', :again)::jsonb) \gset
select is(test.refusal(format('select queue.fail_step(%s, %s, ''lost'', ''first'')', :again, :claim3)), 'QJ003', 'a failure of an earlier run is not repeated');
select queue.succeed(:again, :claim3) \g /dev/null

-- Told to abort
select queue.cancel(:id, abort => true) \g /dev/null
select is(queue.fail_step(:id, :claim, 'r', 'e', null, :'policy'), 'cancelled', 'a job that is told to abort is not tried again');
select is_empty('select * from queue.check()', 'all is sound');
select * from finish();
