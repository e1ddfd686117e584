"""Tasks and their jobs: an application defines tasks, defers jobs, and asks about them."""
