"""Cost of the sandbox: seconds of start, and the share of a step's time."""
