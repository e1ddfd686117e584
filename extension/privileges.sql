-- Privileges: PUBLIC has no rights.

revoke all on all routines in schema queue from public;
