"""Cost of metrics: what counting adds to a step, and what a report costs a worker."""
