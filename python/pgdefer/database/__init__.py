"""The database: its address, connections to it, installing, and every statement sent to it."""
