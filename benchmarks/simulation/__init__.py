"""Trainings on machines and links that are not there: the real decisions, on a fake clock.

What decides is Barnraise's own: plans (``planning``), who computes which units (``runs.leases``,
``training.dealing``), what a member has of the step at hand and ahead of it (``training.at_hand``), whether a
step counts when members die (``runs.commit``, ``training.held``), shares that follow speeds
(``training.pace``), the way that is chosen while training runs (``training.choosing``, ``training.sync``),
and each rank's messages of a sum (``collectives.strategies``, ``collectives.costs``). Simulated are
computing, which is a wait, and links.
Hubs decide by ``hub.rounds``; simulated are their processors, lines, disks and members (`hubs`).
May import Barnraise and the fake clock; nothing imports it but benchmarks and tests.
"""
