"""The branch `pgdefer`: a migration for each release that changes the schema."""
