"""Definition of a run: its record, its workers, its data order and its commits. Pure.

May import ``environments`` and what is below it; never torch. Processes, sockets and clocks do not belong
here: the agent and the workers call these functions. The replicated store is in ``kvstore``.
"""
