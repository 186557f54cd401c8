"""Output of processes on its way to a log, log files on disk, and the audit log.

The audit log says what changed trust and ran code on this machine.
"""
