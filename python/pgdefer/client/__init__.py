"""The client of tasks, jobs and workers: a codec, connections, and the tasks' defaults."""
