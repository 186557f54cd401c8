"""Simulation of the membership: a whole cluster and random schedules of faults on a fake clock."""
