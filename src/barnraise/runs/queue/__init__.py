"""The queue of jobs: signed job specs, their records, and the scheduler. Pure.

A job becomes an ordinary run, once for each attempt. The coordinator's agent calls the scheduler.
"""
