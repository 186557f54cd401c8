"""Lines about a running run: progress, waiting, and the redrawn lines of a terminal."""
