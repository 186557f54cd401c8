"""TODO: autotune."""
