"""A shop that takes orders, and leaves the work to the queue."""
