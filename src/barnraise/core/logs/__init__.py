"""Output of processes on its way to a log, log files on disk, and the audit log of what changed trust and ran code."""
