"""State of the host that decides whether it works now: time of day, battery, metered connection."""
