"""Commands about runs: run, ps, logs, stop, attach, accept, resume and export."""
