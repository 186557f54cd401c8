"""What a run is: its record, its workers, its samples and its commits. Pure.

May import ``environments`` and what is below it; never torch. Replication of the store is in ``kvstore``.
"""
