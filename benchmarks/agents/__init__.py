"""Real agents, runs and terminals on lab hosts, as benchmarks and lab tests drive them."""
