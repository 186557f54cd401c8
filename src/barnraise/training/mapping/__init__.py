"""Maps: a function of many items, each computed once by some worker of the group.

The schedule is pure and stands in ``runs.map_schedule``. Training steps belong into ``training.steps``.
"""
