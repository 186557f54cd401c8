"""Pure state of the rounds: leases, free samples and the decision when a round closes. No I/O."""
