-- Privileges: PUBLIC has no rights.

do $$
declare
  v_function record;
begin
  for v_function in
    select p.oid::regprocedure as signature from pg_proc p where p.pronamespace = 'queue'::regnamespace
  loop
    execute format('revoke all on routine %s from public', v_function.signature);
  end loop;
end $$;
