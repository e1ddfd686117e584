"""The worker: claims jobs, runs them, reports how they ended."""
