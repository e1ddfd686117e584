"""The migrations: one for each release that changes the schema, or a model of a view."""
