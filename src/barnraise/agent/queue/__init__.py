"""The queue of jobs on one agent: its records, the loop that runs the scheduler, and the files of jobs.

Every owner's machine has all records. Only the coordinator schedules (`barnraise.runs.queue`).
"""
