"""Cost of watching a run: the terminal, the page, the metrics and the record together."""
