"""Report of a run: one HTML file without scripts, and without requests to other places. Pure."""
