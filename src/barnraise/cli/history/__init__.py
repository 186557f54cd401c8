"""``barnraise runs``: the records of runs, which outlive them."""
