-- Groups and chains: jobs deferred in one call with needs among them.

-- Locks and errors: as defer_many.
create or replace function queue.defer_group(jobs jsonb, "then" jsonb)
returns table (then_id bigint, ids bigint[])
language plpgsql volatile parallel unsafe security definer rows 1
set search_path = pg_catalog, pg_temp as $$
declare
  v_needs jsonb := defer_group."then" -> 'needs';
begin
  {{installed}}
  if jsonb_typeof(defer_group."then") is distinct from 'object' then
    perform queue._invalid('then must be a JSON object',
      'Pass the job that follows as {"task": text, "args": object, ...}.');
  elsif coalesce(jsonb_typeof(v_needs), 'null') not in ('array', 'null') then
    perform queue._invalid('needs must be a list of ids', 'Pass ids of jobs, or leave needs out.');
  end if;
  ids := array(select d.id from queue.defer_many(defer_group.jobs) with ordinality d (id, n) order by d.n);
  select d.id into then_id
  from queue.defer_many(jsonb_build_array(
    defer_group."then"
      || jsonb_build_object('needs', to_jsonb(ids) || coalesce(nullif(v_needs, 'null'), '[]')))) d (id);
  return next;
end $$;
comment on function queue.defer_group(jsonb, jsonb) is
  'Defers jobs (as defer_many) and one more, "then", that needs all of them and the jobs that its own needs'
    ' name. Its options needs_mode and on_need_failure work as in defer. Returns its id and theirs, in input'
    ' order.';

-- Locks and errors: as defer_many.
create or replace function queue.defer_chain(jobs jsonb)
returns setof bigint language plpgsql volatile parallel unsafe security definer rows 10
set search_path = pg_catalog, pg_temp as $$
declare
  v_job jsonb;
  v_id bigint;
begin
  {{installed}}
  if jsonb_typeof(defer_chain.jobs) is distinct from 'array' then
    perform queue._invalid('jobs must be a JSON array', 'Pass [{"task": text, "args": object, ...}, ...].');
  end if;
  for v_job in select e from jsonb_array_elements(defer_chain.jobs) e loop
    if v_id is not null and jsonb_typeof(v_job) = 'object' then
      perform queue._check_types('a job', v_job);
      v_job := v_job
        || jsonb_build_object('needs', jsonb_build_array(v_id)
        || coalesce(nullif(v_job -> 'needs', 'null'), '[]'));
    end if;
    v_id := queue.defer_many(jsonb_build_array(v_job));
    return next v_id;
  end loop;
end $$;
comment on function queue.defer_chain(jsonb) is
  'Defers jobs (as defer_many), each of which needs the one before it and the jobs that its own needs name.'
    ' Returns the ids in input order.';
