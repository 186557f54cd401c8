"""Consensus: single-decree Paxos for each link of a chain of decisions, and the quorum rule. Pure.

Nothing in it knows what is decided. The views of the cluster belong one level up, in ``membership``.
"""
