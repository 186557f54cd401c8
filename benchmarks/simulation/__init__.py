"""Simulated training on machines and links that do not exist: the real decisions, on a fake clock.

Barnraise's own code decides:

- plans (``planning``), and the division of units between workers (``runs.sharding``,
  ``training.steps.load_balancing``) by measured speeds (``training.steps.throughput``);
- progress of a member in the current step and the next (``training.steps.progress``);
- commits when members die (``runs.commit``, ``training.steps.commit_vote``);
- the synchronization mode while training runs (``training.autotune``, ``training.sync``);
- each rank's messages of an all-reduce (``collectives.algorithms``).

Computing, which is a wait, and links are simulated. Hubs decide by ``hub.rounds``; their processors, lines,
disks and members are simulated (`hub`). This package may import Barnraise and the fake clock; only benchmarks
and tests import it.
"""
