"""Sleep of the operating system: prevent it during a run, and notice it before it happens."""
